"""Who of a script's ranks was killed, as far as its launcher says."""

from __future__ import annotations

import signal

import pytest

from fleetbench.errors import WorkerFailed
from real.job.folder import RankPlace
from real.job.launch import codes_said, said_of_node
from real.processes.diagnosis import how_it_ended
from real.processes.place import Place


def _ranks(*pids: int) -> dict[int, RankPlace]:
    """Ranks of this host with these processes."""
    places = [Place(host="here", pid=pid) for pid in pids]
    return {rank: RankPlace(rank=rank, trainers=len(pids), trainers_per_node=len(pids), place=place) for rank, place in enumerate(places)}


@pytest.mark.parametrize("where", ["rank 1", "rank 1 on node 3"])
def test_our_own_launchers_words_are_understood(where: str) -> None:
    """As the command prints the error of a killed rank; what the ranks themselves said before does not disturb."""
    error = WorkerFailed(how_it_ended(-signal.SIGKILL), where, None, "its output: log/workerlog.1")
    assert codes_said(f"[rank0]: Connection reset by peer\nerror: {error}\n", _ranks(11, 12)) == {1: -signal.SIGKILL}


def test_torchs_agents_words_are_understood() -> None:
    """Its report names processes, of which those of others are not ours to blame."""
    report = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 12)\n  rank: 0\n  exitcode  : 1 (pid: 11)\n  exitcode: 3 (pid: 99)\n"
    assert codes_said(report, _ranks(11, 12)) == {1: -signal.SIGKILL, 0: 1}


def test_a_number_that_two_hosts_have_given_blames_nobody() -> None:
    """A report names processes and no host."""
    assert codes_said("  exitcode  : -9 (pid: 12)\n  exitcode  : 1 (pid: 13)\n", _ranks(12, 12, 13)) == {2: 1}


def test_a_rank_killed_before_it_joined_is_known_by_its_number() -> None:
    """No process is known then, so the report's rank is taken, of signals alone: what ended by an error has said more itself."""
    report = "{}  rank      : {} (local_rank: {})\n  exitcode  : {} (pid: 7)\n"
    said = "".join(report.format(*entry) for entry in (("x\n", 5, 1, -9), ("", 4, 0, -15), ("", 3, 1, 1)))
    assert codes_said(said, {}) == {5: -signal.SIGKILL}
    assert codes_said(report.format("", 5, 1, -9), _ranks(11, 12)) == {}, "a launcher of the script's own"


def test_a_killed_agent_is_what_our_own_launcher_says() -> None:
    """The last line that it says of a node, without what was got, and nothing of its ranks."""
    error = WorkerFailed(f"the launcher of its workers {how_it_ended(-signal.SIGKILL)}", "this node", "x (y)", "the workers' output: log")
    assert said_of_node(f"step 3\nerror: {error}\n") == "this node: the launcher of its workers was killed by SIGKILL"
    assert said_of_node("error: rank 1: was killed by SIGKILL\n") is None
