"""Legs inside a script: when they begin and end, on a model of one parameter, without an engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from fleetbench.result import StepRecord
from fleetbench.strategy import DistributedStrategy
from real.engine.engine import Engine
from real.engine.stopwatch import Stopwatch, TimedStep
from real.job.driver_watch import end_script
from real.job.folder import DriverSide, RankSide
from real.job.rank_legs import EngineSwitch, RankLegs, clock_ahead_ns
from real.leg import Leg
from real.leg_steps import LegSteps, not_finite

Log = list[str]


@dataclass
class FakeEngine:
    """Hears losses."""

    name: str
    log: Log

    @property
    def stopwatch(self) -> FakeEngine:
        """See ``Engine``."""
        return self

    def report(self, loss: torch.Tensor | float) -> None:
        """See ``Engine``."""
        self.log.append(f"loss of {self.name}: {float(loss)}")

    def loss(self, loss: torch.Tensor | float) -> None:
        """See ``Stopwatch``."""


@dataclass
class FakeSite:
    """A place whose engine is nothing."""

    optimizer: torch.optim.Optimizer
    own_strategy: DistributedStrategy = field(default_factory=DistributedStrategy)
    opened: list[DistributedStrategy] = field(default_factory=list)

    def open(self, strategy: DistributedStrategy, **_: object) -> None:
        """See ``EngineSwitch``."""
        self.opened.append(strategy)


@dataclass
class Stage:
    """A script in the middle of a tuning."""

    driver: DriverSide
    log: Log
    site: FakeSite
    steps: RankLegs

    def order(self, number: int, steps: int) -> None:
        """The driver asks for leg ``number``."""
        self.driver.order(number, Leg(steps=steps, warmup_steps=0))

    def begin(self) -> None:
        """The script calls ``fleet.distributed_optimizer``."""
        self.steps.begin(cast("EngineSwitch", self.site))

    def step(self) -> object:
        """The script calls ``optimizer.step()``."""
        return self.site.optimizer.step()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Legs whose parts are written where the driver reads them."""
    driver = DriverSide(tmp_path / "tuning")
    driver.make()
    log: Log = []
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    site = FakeSite(torch.optim.SGD([parameter], lr=0.1))

    def change() -> None:
        site.optimizer.register_step_post_hook(lambda *_: None)

    def begin(leg: Leg, _switch: EngineSwitch, beat: Callable[[int], None]) -> LegSteps:
        number = len([line for line in log if line.startswith("begin")])
        log.append(f"begin {number}")
        beat(1)
        left = leg.steps
        while left and not (yield cast("Engine", FakeEngine(str(number), log))):
            log.append(f"step of {number}")
            change()
            left -= 1
        log.append(f"part of {number}")
        return {"complete": left == 0, "left": left}

    monkeypatch.setattr("real.job.rank_legs.begin_leg", begin)
    monkeypatch.setattr("real.job.rank_legs.end_script", partial(end_script, threading.TIMEOUT_MAX))
    return Stage(driver, log, site, RankLegs(RankSide(driver.path), 0))


def test_the_script_ends_with_its_own_strategy_and_code_0(stage: Stage) -> None:
    """After the last leg ``except Exception`` does not catch what leaves; on its way the script's own strategy is back."""

    def step_as_users_do() -> None:
        try:
            stage.step()
        except Exception:  # noqa: BLE001  # as users do
            pytest.fail("an ordinary exception")

    stage.order(0, 1)
    stage.driver.stop()
    stage.begin()
    with pytest.raises(SystemExit) as caught:
        step_as_users_do()
    assert caught.value.code == 0
    assert stage.site.opened == [stage.site.own_strategy]


def test_a_script_that_ends_leaves_what_it_has(stage: Stage) -> None:
    """At exit an unfinished leg gives an incomplete part, once."""
    stage.order(0, 5)
    stage.begin()
    stage.step()
    stage.steps.exits()
    stage.steps.exits()
    assert stage.driver.parts(0)[0] == {"complete": False, "left": 4}


def test_metrics_go_to_a_leg_that_looks_for_the_target(stage: Stage) -> None:
    """By the leg's own steps, of which the first is 0 after one step of warm-up; other legs keep none."""
    for number, evaluate in enumerate((False, True)):
        stage.driver.order(number, Leg(steps=2, warmup_steps=1, evaluate=evaluate))
    stage.driver.stop()
    stage.begin()
    for value in (0.5, 0.25):
        assert stage.steps.report(1.0, {"acc": torch.tensor(value), "auc": value})
        stage.step()
    assert "metrics" not in stage.driver.parts(0)[0]
    stage.steps.report(1.0, {"acc": torch.tensor(0.75)})
    stage.step()
    stage.steps.report(1.0, {"acc": 0.125})
    with pytest.raises(SystemExit):
        stage.step()
    assert stage.driver.parts(1)[0]["metrics"] == {"acc": [[0, 0.75], [1, 0.125]]}


@pytest.mark.parametrize(
    ("losses", "weight", "found"),
    [
        ([0.5, None, math.inf, math.nan], 1.0, {"what": "the loss was inf", "step": 3}),
        ([math.nan], math.nan, {"what": "the loss was nan", "step": 1}),
        ([0.5, 0.4], math.nan, {"what": "a parameter was NaN or infinite", "step": 9}),
        ([None, 0.4], 1.0, None),
    ],
)
def test_what_is_no_number_is_found_where_it_came_first(losses: list[float | None], weight: float, found: dict[str, Any] | None) -> None:
    """A loss in its step of the leg, counted from 1 whatever the record calls it; a parameter after the last of nine steps."""
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, weight)
    zeros = dict.fromkeys(("start_ns", "forward_ns", "backward_ns", "stall_ns", "update_ns", "end_ns", "bytes_sent"), 0)
    stopwatch = Stopwatch(rank=0)
    for step, loss in enumerate(losses, start=70):
        record = StepRecord(rank=0, step=step, arrival_ns=None, local_steps=None, loss=loss, **zeros)
        stopwatch.steps.append(TimedStep(record, 0))
    assert not_finite(stopwatch, model, 9) == found


@pytest.mark.parametrize(("kernels", "offset_ns"), [(["a", "b", "b"], 40), (["a", "a", "b"], 0), (["a", "a", "a"], 0)])
def test_clocks_of_other_hosts_are_compared_with_rank_0s(kernels: list[str], offset_ns: int) -> None:
    """By the median over meetings that ranks leave at about one time, however far apart they came; a kernel has one clock."""
    apart = iter([900, 40, 10, 20, 30, 35, 60, 70, 80, 90])
    meeting: Any = SimpleNamespace(rank=1, trainers=3, texts=lambda _: kernels, gather=lambda own: [[own[0] - next(apart)], own, own])
    assert clock_ahead_ns(meeting) == offset_ns
    assert len(list(apart)) == (10 if len(set(kernels)) == 1 else 0)
