"""Who is to blame for the end of a launch on several nodes."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import cast

import pytest

from fleetbench.errors import EnvironmentLacks
from real.job.launcher import ENDED_THERE, QUIET, CollectiveJob, Nodes, _met, _own, apart
from real.processes import joining
from real.processes.diagnosis import STOPPED
from real.processes.joining import _address, interface_towards, is_loopback, own_among
from real.processes.roles import Role
from real.servers.board import Board, Entry
from real.servers.hosts import Placement

NODES = Nodes(num=3, rank=0, host="10.0.0.1", port=29500)
LOG = Path("log")


def _blamed(
    *ended: tuple[int, int], nodes: int = 3, gone: tuple[int, ...] = (), stopped: tuple[int, ...] = (), interrupted: int | None = None
) -> str:
    """Of nodes of two ranks each; ``ended``: ranks and their exit codes, in the order in which they ended."""
    workers = tuple(name for name in dataclasses.replace(NODES, num=nodes).names for _ in range(2))
    job = CollectiveJob(Placement(endpoints=(), workers=workers, own=frozenset(["node 0"])))
    for rank, code in ended:
        job.hear(Entry(kind="ended", name=f"rank {rank}", code=code))
    for node in gone:
        job.hear(Entry(kind="gone", name=f"node {node}"))
    for rank in stopped:
        job.hear(Entry(kind="failed", name=f"rank {rank}", why=STOPPED))
    if interrupted is not None:
        job.hear(Entry(kind="failed", name=f"node {interrupted}", why=ENDED_THERE))
    return str(job.judge(LOG))


def test_all_is_well_where_nobody_failed() -> None:
    """Ranks ended with code 0."""
    assert _blamed((0, 0), (1, 0)) == "None"


def test_the_node_that_spoke_first_holds_the_rank_that_failed_first() -> None:
    """Ranks elsewhere fail in their collectives a moment later, with lower numbers."""
    text = _blamed((3, 7), (0, 1), (1, 1))
    assert "rank 3 on node 1: ended with exit code 7" in text
    assert "workerlog.3" in text


def test_who_was_killed_goes_before_who_failed() -> None:
    """A signal has no other rank for its cause, whichever node spoke first; the launchers' own SIGTERM is none."""
    assert "rank 3 on node 1: was killed by SIGKILL" in _blamed((0, 1), (2, -signal.SIGTERM), (3, -signal.SIGKILL))


def test_a_node_without_a_word_goes_before_who_failed() -> None:
    """Its workers died with it, and the others' failed for want of them."""
    assert "node 1: its launcher ended without a word" in _blamed((0, 1), gone=(1,))


def test_a_kill_explains_more_than_a_silent_node() -> None:
    """A rank killed elsewhere is a cause; a node may then be slow to say how it ended."""
    assert "rank 0 on node 0: was killed" in _blamed((0, -signal.SIGSEGV), gone=(1,))


def test_an_ended_launch_goes_before_who_failed() -> None:
    """Somebody ended it on node 2; ranks of node 0 noticed."""
    assert "node 2: the launch was ended there" in _blamed((0, 1), interrupted=2)


def test_a_stopped_rank_goes_before_all() -> None:
    """Those that waited for it failed, or were told to end."""
    assert "rank 4 on node 2: was stopped" in _blamed((0, 1), (1, -signal.SIGKILL), stopped=(4,))


def test_one_machine_has_no_nodes() -> None:
    """A rank is named alone."""
    job = CollectiveJob(Placement(endpoints=(), workers=("", ""), own=frozenset([""])))
    job.codes = {"rank 0": 1, "rank 1": -signal.SIGKILL}
    error = job.judge(LOG)
    assert error is not None
    assert (error.where, error.what, error.hint) == ("rank 1", "was killed by SIGKILL", "its output: log/workerlog.1")


def test_nodes_that_never_met_are_the_environments_fault() -> None:
    """Exit code 3, with the place where they waited."""
    error = apart(NODES, "node 2 does not answer")
    assert isinstance(error, EnvironmentLacks)
    assert "10.0.0.1:29500" in str(error)


class Told:
    """A board on which others write: an entry a turn, or an exception that comes then."""

    def __init__(self, *turns: Entry | BaseException) -> None:
        self.turns, self.written = list(turns), []

    def write(self, entry: Entry) -> None:
        """See ``Board``."""
        self.written.append(entry)

    def turn(self) -> list[Entry]:
        """See ``Board``."""
        told = self.turns.pop(0)
        if isinstance(told, BaseException):
            raise told
        return [told]


def _here(node: int) -> Entry:
    return Entry(kind="here", name=f"node {node}", code=2, why="4711" if node == 0 else "")


def test_a_node_that_gives_up_while_it_waits_tells_the_others() -> None:
    """Interrupted before all had come: the others, who come later, hear of it before their first collective."""
    board = Told(_here(0), KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        _met(dataclasses.replace(NODES, rank=1), 2, cast(Board, board), None)
    failed = Entry(kind="failed", name="node 1", why=ENDED_THERE)
    assert board.written[-1] == failed
    job, _ = _met(NODES, 2, cast(Board, Told(_here(0), _here(1), failed, _here(2))), None)
    assert job.is_over()
    assert job.failure == failed


@pytest.mark.parametrize("early", [Entry(kind="gone", name="node 1"), Entry(kind="failed", name="node 1", why=ENDED_THERE)])
def test_a_node_that_is_started_again_before_all_met_is_as_good_as_new(early: Entry) -> None:
    """What was said of its first launcher does not count against the second."""
    job, meeting = _met(NODES, 2, cast(Board, Told(_here(0), _here(1), early, _here(1), _here(2))), None)
    assert not job.is_over()
    assert (job.gone, job.failure) == (set(), None)
    assert (len(job.placement.workers), meeting["MASTER_PORT"]) == (6, "4711")


def test_a_number_of_ranks_without_sense_is_no_node() -> None:
    """It would be as many places in memory."""
    board = Told(_here(0), dataclasses.replace(_here(1), code=2**30), _here(2), TimeoutError())
    with pytest.raises(TimeoutError):
        _met(NODES, 2, cast(Board, board), None)


def test_the_interface_towards_an_address() -> None:
    """Towards the loopback it is the loopback; an unknown name is an error with a hint."""
    assert interface_towards("127.0.0.1", 1) == "lo"
    with pytest.raises(EnvironmentLacks) as caught:
        interface_towards("no-such-host.invalid", 1)
    assert "GLOO_SOCKET_IFNAME" in str(caught.value.hint)


def test_a_name_that_is_the_loopback_here_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a host's own name that its system lists under 127.0.1.1; not where it is meant, or somebody has chosen an interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.setattr(joining, "interface_towards", lambda *_, **__: "lo")
    with pytest.raises(EnvironmentLacks, match="no other machine comes"):
        joining.take_interface("node0", 1)
    joining.take_interface("localhost", 1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    joining.take_interface("node0", 1)


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("localhost", True), ("127.0.0.1", True), ("[::1]", True), ("127.0.1.1", True), ("10.0.0.1", False), ("node0", False)],
)
def test_addresses_that_mean_the_machine_itself(host: str, is_it: bool) -> None:
    """Names other than localhost may mean any machine."""
    assert is_loopback(host) == is_it


def test_this_machine_is_found_among_hosts() -> None:
    """Addresses of this machine's interfaces, and no others."""
    assert own_among(["192.0.2.1", "127.0.0.1", "no-such-host.invalid"]) == [1]


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch on one machine sets threads and messages only where nobody has; where gloo listens is not the user's to say."""
    for name in ("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    assert _own(QUIET) == QUIET
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert _own(QUIET) == {name: value for name, value in QUIET.items() if name != "OMP_NUM_THREADS"}


def test_the_way_to_rank_0_counts_on_several_nodes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers of one machine under torchrun, and those that meet in a file, need no interface chosen."""
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    torchrun = Role(launcher="torchrun", trainers=4, trainers_per_node=2, rendezvous="env://")
    assert _address(torchrun) == ("10.0.0.1", 29500)
    assert _address(dataclasses.replace(torchrun, trainers_per_node=None)) == ("10.0.0.1", 29500)
    assert _address(dataclasses.replace(torchrun, trainers_per_node=4)) is None
    assert _address(dataclasses.replace(torchrun, rendezvous="file:///tmp/x")) is None
    assert _address(dataclasses.replace(torchrun, rendezvous="tcp://10.0.0.2:22")) == ("10.0.0.2", 22)
