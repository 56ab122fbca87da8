"""Collectives: stock gloo on the hosts of a testbed, and how long its all-reduces take."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from fleetbench.errors import WorkerFailed
from real.testbed.fit import wire_s
from real.testbed.ground import Testbed
from real.testbed.processes import Processes

SIZES = (100_000, 250_000, 500_000, 1_000_000, 4_000_000)
"""Bytes of the all-reduces that are compared with the closed form."""
_LEAD_NS = 50_000_000
"""Ranks are told this much ahead when to start."""
_SETTLE_NS = 10_000_000
_TARGET_S = 1.5
_FEWEST, _MOST = 5, 60


class Ranks:
    """Processes of gloo, one for each entry of ``hosts``. A context manager: inside they run, behind it they are gone."""

    def __init__(self, testbed: Testbed, folder: Path, hosts: Sequence[str] | None = None) -> None:
        self._testbed = testbed
        self._folder = folder
        self._hosts = tuple(hosts or testbed.topology.hosts)
        self.processes: Processes

    def __enter__(self) -> Self:
        self.processes = Processes(self._testbed, self._folder, self._hosts)
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.end()

    def open(self, groups: Sequence[Sequence[int]] | None = None) -> None:
        """Join ranks in groups, by default all in one; connections are made anew."""
        for group in groups or [range(len(self._hosts))]:
            store = self._folder / f"gloo-{secrets.token_hex(8)}"  # an old store would hand out addresses of ranks that are gone
            for place, rank in enumerate(group):
                self.processes.tell(rank, {"do": "open", "store": str(store), "rank": place, "size": len(group)})
        self.processes.answers()

    def all_reduce(self, nbytes: int, *, rounds: int, idle_s: float = 0.0, expected_s: float = 0.0) -> list[float]:
        """Seconds of each of ``rounds`` all-reduces of ``nbytes``, from the first rank's begin to the last one's end.

        Back to back, or each after ``idle_s`` without traffic, where ``expected_s`` says how long one takes.
        Raises ``WorkerFailed`` for a wrong sum.
        """
        period_ns = round(1e9 * (idle_s + 1.3 * expected_s)) + _SETTLE_NS if idle_s else 0
        start_ns = time.monotonic_ns() + _LEAD_NS + round(2e9 * expected_s)  # behind an untimed first one
        request = {"do": "all_reduce", "nbytes": nbytes, "rounds": rounds, "start_ns": start_ns, "period_ns": period_ns}
        for rank in range(len(self._hosts)):
            self.processes.tell(rank, request)
        answers = self.processes.answers()
        for rank, answer in enumerate(answers):
            if not answer["right"]:
                raise WorkerFailed("an all-reduce of known numbers gave a wrong sum", f"rank {rank}", f"{nbytes} bytes")
        ends = [max(column) for column in zip(*(answer["end_ns"] for answer in answers), strict=True)]
        begins = [min(column) for column in zip(*(answer["begin_ns"] for answer in answers), strict=True)]
        if not idle_s:
            begins[1:] = ends[:-1]
        return [1e-9 * (end - begin) for begin, end in zip(begins, ends, strict=True)]

    def medians(self, rate_bps: int, *, sizes: Sequence[int] = SIZES, idle_s: float = 0.0) -> dict[int, float]:
        """Median time by size, over about a second and a half each; ``rate_bps`` says how many rounds that will be."""
        found = {}
        for nbytes in sizes:
            wire = wire_s(nbytes, len(self._hosts), rate_bps)
            rounds = min(_MOST, max(_FEWEST, round(_TARGET_S / (wire + idle_s))))
            found[nbytes] = statistics.median(self.all_reduce(nbytes, rounds=rounds, idle_s=idle_s, expected_s=wire))
        return found
