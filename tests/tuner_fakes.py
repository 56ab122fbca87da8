"""Fakes after the tuner's two seams: runs whose times come from a formula."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from fleetbench.experiment import Experiment
from fleetbench.plan.build import Setting, build_plan
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key, table_for
from fleetbench.result import RunResult, StepRecord, steps_table, summary_of
from fleetbench.store import new_run_id
from fleetbench.strategy import DistributedStrategy
from real.leg import Leg

StepS = Callable[[DistributedStrategy], float]
FEW: dict[str, object] = {
    "trials": 30,
    "simulated_steps": 10,
    "leg_steps": 5,
    "pairs": 4,
    "local_steps": (1, 4, 16),
    "fuse_grad_size_in_MB": (0.25, 1.0, 8.0, 32.0),
    "fusion": (),
    "wire": ("fp32",),
    "update_by_bucket": (False,),
    "target_seeds": 5,
}
"""Of ``[tune]``, unless a test asks for other: few values and no rules, for whatever is not about the search space itself."""


def layers_experiment(**tune: object) -> Experiment:
    """Ten equal layers, one gradient of 400,000 bytes each, on two nodes; no target."""
    return Experiment.from_dict(
        {
            "name": "planted",
            "workload": {
                "model": "layers",
                "steps": 40,
                "layers": [{"name": "block", "params": 100_000, "forward": "1 ms", "backward": "2 ms", "repeat": 10}],
            },
            "cluster": {"nodes": 2, "inter": {"bandwidth": "1 Gbit/s", "latency": "50 us"}},
            "tune": FEW | tune,
            "run": {"device": "emulated"},
        }
    )


def target_experiment(**tune: object) -> Experiment:
    """The same with a target, on a declared loss, so that local steps have a price."""
    return layers_with({"target_loss": 0.5, "loss_curve": {"start": 2.0, "floor": 0.1, "half_life": "20 steps"}}, **tune)


def layers_with(workload: dict[str, object], cluster: dict[str, object] | None = None, **tune: object) -> Experiment:
    """``layers_experiment`` with some keys of its workload and cluster changed."""
    from fleetbench.config import encode

    data = encode(layers_experiment(**tune))
    data["workload"] |= workload
    data["cluster"] |= cluster or {}
    return Experiment.from_dict(data)


def profiled_experiment(folder: Path, threads: tuple[int, ...] = (1, 2), **tune: object) -> Experiment:
    """A registry model with a target and a profile of ten layers; two threads take 0.8 of one's time."""
    workload = {"model": "digits_mlp", "steps": 40, "target_loss": 0.5, "profile": str(folder / "profile.toml")}
    experiment = Experiment.from_dict(
        {
            "name": "profiled",
            "workload": workload,
            "cluster": {"trainers_per_node": 2, "intra": {"bandwidth": "1 Gbit/s", "latency": "50 us"}},
            "tune": FEW | tune,
        }
    )
    tables = []
    for count in threads:
        scale = 10**6 if count == 1 else 8 * 10**5
        layers = tuple(
            Layer(
                name=f"block{index}",
                gradients=(Gradient(name=f"block{index}.weight", numel=100_000, ready=2 * scale * (10 - index)),),
                forward=scale,
                backward=2 * scale,
            )
            for index in range(10)
        )
        tables.append(LayerTable(key=compute_key(experiment, DistributedStrategy(thread_num=count)), layers=layers))
    Profile(machine="none", created="never", tables=tuple(tables)).save(folder / "profile.toml")
    return experiment


def made_result(
    experiment: Experiment,
    step_s: float,
    *,
    executor: str,
    steps_to_target: float | None = None,
    final_loss: float | None = None,
    metrics: dict[str, float] | None = None,
) -> RunResult:
    """A run of two ranks in which every step takes ``step_s``, all of it forward."""
    steps = experiment.workload.steps
    table, times = _table(round(step_s * 1e9), steps), dict.fromkeys(("mean", "p50", "p95", "p99"), round(step_s, 9))
    totals = {"wall_s": steps * times["mean"], "steps": steps, "step_s": times, "compute_s": times["mean"], "bytes_sent_per_trainer": 0}
    totals |= {"rounds": [1] * steps} | dict.fromkeys(("wait_s", "exposed_comm_s", "update_s", "other_s"), 0.0)
    known = {"executor": executor, "run_id": new_run_id(), "final_loss": final_loss, "steps_to_target": steps_to_target, "metrics": metrics}
    plan = build_plan(experiment.strategy, table_for(experiment).by_readiness(), Setting(trainers=2))
    return RunResult(experiment=experiment, summary=summary_of(experiment, totals, **known), steps=table, plan=plan)


@functools.lru_cache(maxsize=256)  # a search asks for a few, again and again
def _table(step_ns: int, steps: int) -> pd.DataFrame:
    """The rows of a run of two ranks."""
    records = [
        StepRecord(
            rank=rank,
            step=step,
            start_ns=(step - 1) * step_ns,
            forward_ns=step_ns,
            backward_ns=0,
            stall_ns=0,
            update_ns=0,
            end_ns=step * step_ns,
            arrival_ns=None,
            local_steps=1,
            loss=None,
            bytes_sent=0,
        )
        for rank in range(2)
        for step in range(1, steps + 1)
    ]
    return steps_table(records)


@dataclass
class FakeSimulate:
    """A simulator by formula that keeps the strategies it was asked for."""

    step_s: StepS
    asked: list[DistributedStrategy] = field(default_factory=list)

    def __call__(self, experiment: Experiment) -> RunResult:
        """See ``Simulate``."""
        return made_result(experiment, self.seconds(experiment.strategy), executor="sim")

    def seconds(self, strategy: DistributedStrategy) -> float:
        """Of a step, for a search."""
        self.asked.append(strategy)
        return round(self.step_s(strategy), 9)


@dataclass
class FakeRunner:
    """Processes by formula that keep the legs they were asked for.

    ``noise`` gives a factor for the n-th leg, ``void`` whether a testbed calls it void; ``time_to_target_s``
    is asked in legs that evaluate, or ``updates``, where runs differ by their seeds; without both, all ways take 80 updates.
    """

    experiment: Experiment
    step_s: StepS
    time_to_target_s: StepS | Callable[[DistributedStrategy], float | None] | None = None
    noise: Callable[[int], float] = lambda _: 1.0
    void: Callable[[int], bool] = lambda _: False
    legs: list[Leg] = field(default_factory=list)
    rows: list[list[Leg]] = field(default_factory=list)
    """What was to be together."""
    startup_s: float = 0.0
    updates: Callable[[Leg], float | None] | None = None
    metrics: Callable[[Leg], dict[str, float] | None] = lambda _: None
    """At the target."""
    by_seed: float = 0.001
    """What a seed adds to the loss at the end; 0 of a script that ignores its seed."""

    def together(self, legs: Sequence[Leg]) -> None:
        """See ``Runner``."""
        self.rows.append(list(legs))

    def run(self, leg: Leg) -> RunResult:
        """See ``Runner``."""
        from dataclasses import replace

        step_s = self.step_s(leg.strategy) * self.noise(len(self.legs))
        self.legs.append(leg)
        experiment = self.experiment.replace(strategy=leg.strategy, workload=replace(self.experiment.workload, steps=leg.steps))
        steps = self._steps_to_target(leg) if leg.evaluate else None
        final_loss = None if not leg.evaluate else (0.4 if steps is not None else 0.9) + self.by_seed * (leg.seed or 0)
        result = made_result(experiment, step_s, executor="real", steps_to_target=steps, final_loss=final_loss, metrics=self.metrics(leg))
        if self.void(len(self.legs) - 1):
            result = replace(result, summary=replace(result.summary, testbed={"counts": False}))
        return result

    def _steps_to_target(self, leg: Leg) -> float | None:
        if self.updates is not None:
            return self.updates(leg)
        if self.time_to_target_s is None:
            return 80.0
        reached_s = self.time_to_target_s(leg.strategy)
        return None if reached_s is None else reached_s / self.step_s(leg.strategy)
