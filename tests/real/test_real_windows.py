"""Legs read the injected stragglers of their window."""

from types import SimpleNamespace
from typing import Any, cast

from fleetbench.cluster import Cluster
from fleetbench.experiment import Experiment
from fleetbench.stragglers import Jitter, draws
from real.leg import Leg
from real.training import Training


def read_by(leg: Leg, rank: int = 1) -> dict[int, int]:
    """X of every step of a leg, on one of two ranks with jitter."""
    experiment = Experiment(name="windows", cluster=Cluster(trainers_per_node=2, stragglers=(Jitter(),)))
    rank_of = cast("Any", SimpleNamespace(_experiment=experiment, communicators=SimpleNamespace(rank=rank)))
    return Training._draws(rank_of, leg)  # of an object that needs no launch


def test_windows_lie_one_after_the_other() -> None:
    """Steps of a leg keep their numbers; the third window's first draw is the one after the second's last."""
    found = [read_by(Leg(steps=5, warmup_steps=2, window=window)) for window in range(3)]
    assert all(list(one) == [-1, 0, 1, 2, 3, 4, 5] for one in found)
    assert [x for one in found for x in one.values()] == draws((Jitter(),), 0, 2, 2, -1, 21)[1].tolist()


def test_legs_of_one_window_share_their_draws() -> None:
    """Whatever their strategy and start; another window, or another rank, has others."""
    leg = Leg(steps=5, warmup_steps=2, window=3)
    assert read_by(leg) == read_by(Leg(steps=5, warmup_steps=2, window=3, start="initial"))
    assert read_by(leg) != read_by(Leg(steps=5, warmup_steps=2, window=4))
    assert read_by(leg) != read_by(leg, rank=0)
