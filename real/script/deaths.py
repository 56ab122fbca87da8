"""Deaths: which rank of a script ended first, and how, although somebody else has started and reaps it.

A process that has ended stays a zombie until its launcher waits for it, and the kernel tells its exit
code meanwhile. What was missed is looked for in what the launcher said: torch's agent names the exit
code of every process, and ``fleetbench launch`` the rank that it blames.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from real.job.folder import RankPlace
from real.processes.place import Place, process_state

_OF_AGENT = re.compile(r"exitcode\s*:\s*(-?\d+)\s*\(pid:\s*(\d+)\)")
_RANK_OF_AGENT = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank: \d+\)\n\s*exitcode\s*:\s*-(\d+) ", re.MULTILINE)
_OF_LAUNCH = re.compile(r"^error: rank (\d+)(?: on node \d+)?: was killed by (SIG[A-Z0-9]+)", re.MULTILINE)

_OF_NODE = re.compile(r"^error: ((?:this node|node \d+): [^(\n]*)", re.MULTILINE)


class Deaths:
    """Watches the ranks of this host; ``look`` often."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        """Exit codes of ranks that ended, negative for a signal; those of the first look that found any."""
        self._here = Place.here()

    def look(self, ranks: Mapping[int, RankPlace]) -> None:
        """See who has ended, until somebody has."""
        if self.codes:
            return
        for rank, found in ranks.items():
            if found.place.shares_numbers(self._here) and process_state(found.place.pid) == "Z":
                code = _exit_code(found.place.pid)
                if code:
                    self.codes[rank] = code

    def read(self, log: str, ranks: Mapping[int, RankPlace]) -> None:
        """Take from a launcher's output what was not seen; of who was killed before all had joined, by the number that it gives."""
        num_of_pid = Counter(found.place.pid for found in ranks.values())
        of_pid = {found.place.pid: rank for rank, found in ranks.items()}
        for code, pid in _OF_AGENT.findall(log):
            if num_of_pid[int(pid)] == 1:  # hosts may have given one number to several ranks, and the report names no host
                self.codes.setdefault(of_pid[int(pid)], int(code))
        for rank, number in _RANK_OF_AGENT.findall(log) if not ranks else ():
            if int(number) != signal.SIGTERM:  # by which the agent ends the others
                self.codes.setdefault(int(rank), -int(number))
        for rank, name in _OF_LAUNCH.findall(log):
            self.codes.setdefault(int(rank), -signal.Signals[name])


def said_of_node(log: str) -> str | None:
    """What ``fleetbench launch`` said last of a node: that the agent of its workers was killed, say. None where it said nothing."""
    found = _OF_NODE.findall(log)
    return found[-1].strip() if found else None


def _exit_code(pid: int) -> int | None:
    """Of a zombie; none where it is gone by now, or not ours to ask."""
    try:
        status = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()[-1])
    except (OSError, ValueError):
        return None
    return -(status & 0x7F) if status & 0x7F else status >> 8
