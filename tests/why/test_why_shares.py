"""Shares: a step divided by what its ranks have seen, against steps that are written by hand."""

from __future__ import annotations

import random

import pytest

from fleetbench.why.observed import RankLog
from fleetbench.why.shares import Kind, Share, Shares
from fleetbench.why.steps import shares_of

MS = 1_000_000


class Rank:
    """A rank's day, written down activity by activity; all times in milliseconds."""

    def __init__(self, rank: int, start: float = 0.0, ahead: float = 0.0, drift: float = 0.0) -> None:
        self.rank, self.now, self.ahead, self.drift = rank, start, ahead, drift
        self.events: list[tuple[str, int, int, int]] = []
        self.ends: list[int] = []

    def stamp(self, at: float) -> int:
        """Nanoseconds on this rank's clock."""
        return round((at + self.ahead + self.drift * at) * MS)

    def does(self, kind: Kind, ms: float) -> None:
        """Do one thing for so long."""
        if kind != "loop":
            self.events.append((kind, self.stamp(self.now), self.stamp(self.now + ms), 0))
        self.now += ms

    def backward(self, ms: float, until: float) -> None:
        """Compute for ``ms``, and be done with the exchange at ``until``."""
        computed = self.now + ms
        self.events.append(("backward", self.stamp(self.now), self.stamp(until), self.stamp(computed)))
        self.now = until

    def buffers(self, until: float) -> None:
        """Send or receive buffers until then."""
        self.events.append(("buffers", self.stamp(self.now), self.stamp(until), 0))
        self.now = until

    def ends_step(self) -> None:
        """An optimizer step has ended."""
        self.ends.append(self.stamp(self.now))

    def log(self) -> RankLog:
        """What this rank has seen."""
        log = RankLog(
            rank=self.rank,
            host="a",
            device="cpu",
            threads=1,
            sets_threads=False,
            cores=2,
            cpu_cores=1.0,
            step_ends_ns=tuple(self.ends),
            events=tuple(self.events),
        )
        ends = (self.ends[0], self.ends[-1])
        return log.aligned(*((at, round((self.ahead + self.drift * (at / MS - self.ahead)) * MS)) for at in ends))


def train(
    num_ranks: int,
    num_steps: int,
    *,
    exchange: float = 5.0,
    more: dict[tuple[int, str], float] | None = None,
    stall: tuple[int, int, str, float] | None = None,
    ahead: float = 0.0,
    drift: float = 0.0,
    seed: int | None = None,
) -> Shares:
    """Steps of 2 ms of input, 10 + 20 ms of compute, an exchange, 3 ms of update and 1 ms of loop, with something planted.

    ``more``: ms more of a kind on a rank. ``stall``: (rank, every, kind, ms).
    """
    draws, planted = random.Random(seed), more or {}  # noqa: S311  # a test's own
    ranks = [Rank(rank, ahead=ahead * rank, drift=drift * rank) for rank in range(num_ranks)]
    for step in range(num_steps + 1):
        for rank in ranks:
            noise = 1.0 if seed is None else draws.uniform(0.9, 1.1)
            for kind, ms in (("loop", 1.0), ("input", 2.0), ("forward", 10.0)):
                rank.does(kind, ms * noise + planted.get((rank.rank, kind), 0.0))  # type: ignore[arg-type]  # kinds, all of them
            if stall is not None and stall[0] == rank.rank and step % stall[1] == 0:
                rank.does(stall[2], stall[3])  # type: ignore[arg-type]  # a kind
        backward = {rank.rank: 20.0 + planted.get((rank.rank, "backward"), 0.0) for rank in ranks}
        done = max(rank.now + backward[rank.rank] for rank in ranks) + exchange
        for rank in ranks:
            rank.backward(backward[rank.rank], done)
            rank.does("optimizer", 3.0)
            rank.ends_step()
    return shares_of([rank.log() for rank in ranks])


def seconds(found: Shares, kind: Kind, *, rank: int | None = None, periodic: bool = False) -> float:
    """Milliseconds per step of one kind."""
    return 1e3 * sum(each.seconds for each in found.shares if (each.kind, each.rank, each.period is not None) == (kind, rank, periodic))


def test_equal_ranks_wait_for_nobody() -> None:
    """Each activity has its own share, and what follows the last gradient is exposed communication."""
    found = train(2, 20)
    assert found.step_s == pytest.approx(0.041)
    assert {each.kind: round(1e3 * each.seconds, 6) for each in found.shares} == {
        "loop": 1,
        "input": 2,
        "forward": 10,
        "backward": 20,
        "gradients": 5,
        "optimizer": 3,
    }


@pytest.mark.parametrize("kind", ["input", "forward", "backward", "loop"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_slow_rank_is_named_with_what_it_does_more_of(kind: Kind, num_ranks: int) -> None:
    """The others wait for as long as the last rank takes more, and the share says by what."""
    found = train(num_ranks, 20, more={(1, kind): 15.0})
    assert seconds(found, kind, rank=1) == pytest.approx(15.0)
    assert seconds(found, "gradients") == pytest.approx(5.0)
    assert found.step_s == pytest.approx(0.056)


def test_clocks_of_hosts_may_differ() -> None:
    """Times are brought to rank 0's clock before ranks are compared, and clocks drift in between."""
    assert seconds(train(2, 20, more={(1, "input"): 15.0}, ahead=1234.5), "input", rank=1) == pytest.approx(15.0)
    drifts = train(2, 200, more={(1, "input"): 15.0}, ahead=1234.5, drift=5e-4)
    assert seconds(drifts, "input", rank=1) == pytest.approx(15.0, rel=0.01)


def test_what_comes_now_and_then_is_told_apart() -> None:
    """A checkpoint of rank 0 in each tenth step makes the others wait a tenth of it per step, and its period is known."""
    found = train(2, 40, stall=(0, 10, "save", 200.0))
    waited = next(each for each in found.shares if each.kind == "save")
    assert (waited.rank, waited.period) == (0, 10)
    assert 1e3 * waited.seconds == pytest.approx(20.0)


def test_a_broadcast_is_waited_for_until_the_last_rank_is_there() -> None:
    """A rank that comes to the buffers' broadcast first waits; what follows is the buffers' own time."""
    ranks = [Rank(0), Rank(1)]
    for _ in range(21):
        start = ranks[0].now
        ranks[0].does("loop", 9.0)
        for rank in ranks:
            rank.buffers(start + 9.0 + 4.0)
            rank.does("forward", 10.0)
            rank.backward(20.0, rank.now + 20.0)
            rank.ends_step()
    found = shares_of([rank.log() for rank in ranks])
    assert seconds(found, "buffers") == pytest.approx(4.0)
    assert seconds(found, "loop", rank=0) == pytest.approx(9.0)


@pytest.mark.parametrize("seed", range(20))
def test_shares_add_up_to_the_step(seed: int) -> None:
    """Whatever ranks do, the shares are those of whole steps."""
    draws = random.Random(seed)  # noqa: S311  # as above
    kinds = ("input", "forward", "backward", "loop")
    more = {(draws.randrange(3), draws.choice(kinds)): draws.uniform(0, 30) for _ in range(draws.randrange(4))}
    found = train(3, 30, more=more, exchange=draws.uniform(0, 20), seed=seed, stall=(draws.randrange(3), 7, "save", draws.uniform(0, 90)))
    assert sum(each.seconds for each in found.shares) == pytest.approx(found.step_s)
    assert all(each.seconds > 0 for each in found.shares)


def test_jitter_is_nobodys() -> None:
    """Where each rank is the last now and then, the wait names none of them."""
    found = train(2, 200, seed=3)
    waits = [each for each in found.shares if each.rank is not None]
    assert {each.rank for each in waits} <= {0, 1}
    assert Share(kind="forward", seconds=0.1, rank=0) not in waits
    assert found.steady_rank is None
    assert train(2, 50, more={(1, "forward"): 6.0}, seed=3).steady_rank == 1


def test_nested_events_count_once() -> None:
    """Where forward and backward run inside of the optimizer's step, as in Lightning, each has its own time, and the update the rest."""
    ranks = [Rank(0), Rank(1)]
    for _ in range(11):
        for rank in ranks:
            start = rank.now
            rank.does("forward", 10.0)
            rank.backward(20.0, rank.now + 24.0)
            rank.now += 3.0
            rank.events.append(("optimizer", rank.stamp(start), rank.stamp(rank.now), 0))
            rank.ends_step()
    found = shares_of([rank.log() for rank in ranks])
    assert {each.kind: round(1e3 * each.seconds, 6) for each in found.shares} == {
        "forward": 10,
        "backward": 20,
        "gradients": 4,
        "optimizer": 3,
    }
