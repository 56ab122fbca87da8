"""Who of a script's ranks was killed, as far as its launcher says."""

from __future__ import annotations

import signal

import pytest

from fleetbench.errors import WorkerFailed
from real.processes.diagnosis import how_it_ended
from real.script.deaths import Deaths
from real.script.folder import RankPlace
from real.script.place import Place


def _ranks(*pids: int) -> dict[int, RankPlace]:
    """Ranks of this host with these processes."""
    places = [Place(host="here", pid=pid) for pid in pids]
    return {rank: RankPlace(rank=rank, trainers=len(pids), trainers_per_node=len(pids), place=place) for rank, place in enumerate(places)}


@pytest.mark.parametrize("where", ["rank 1", "rank 1 on node 3"])
def test_our_own_launchers_words_are_understood(where: str) -> None:
    """As the command prints the error of a killed rank; what the ranks themselves said before does not disturb."""
    error = WorkerFailed(how_it_ended(-signal.SIGKILL), where, None, "its output: log/workerlog.1")
    deaths = Deaths()
    deaths.read(f"[rank0]: Connection reset by peer\nerror: {error}\n", _ranks(11, 12))
    assert deaths.codes == {1: -signal.SIGKILL}


def test_torchs_agents_words_are_understood() -> None:
    """Its report names processes, of which those of others are not ours to blame."""
    report = "  rank      : 1 (local_rank: 1)\n  exitcode  : -9 (pid: 12)\n  rank: 0\n  exitcode  : 1 (pid: 11)\n  exitcode: 3 (pid: 99)\n"
    deaths = Deaths()
    deaths.read(report, _ranks(11, 12))
    assert deaths.codes == {1: -signal.SIGKILL, 0: 1}


def test_what_was_seen_is_not_overruled() -> None:
    """A launcher ends the others once one has failed, and blames whom it met first."""
    deaths = Deaths()
    deaths.codes = {0: 7}
    deaths.read("error: rank 0: was killed by SIGTERM\n", _ranks(11))
    assert deaths.codes == {0: 7}
