"""Predictions: what the simulator and its rivals say of every cell, before any of them runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from calibrate import links_of
from files import Entry, Files, digest_of, now
from grid import CALIBRATING, WARMUP, Environment, num_steps
from rivals import rivals

from fleetbench.cluster import Link
from fleetbench.plan.layers import declared_table
from fleetbench.profile import Profile, name_profile
from fleetbench.result import RunResult
from fleetbench.store import versions
from fleetbench.strategy import DistributedStrategy
from sim.run import Engine, simulate

PHASES = {
    "compute": ("forward_s", "backward_s"),
    "wait": ("wait_s",),
    "exposed": ("exposed_comm_s",),
    "update": ("update_s",),
    "other": ("other_s",),
}


def predict(files: Files, environments: tuple[Environment, ...], leg_s: float, engine: Engine = "auto") -> Entry:
    """All cells by one engine, and what they rest on."""
    return {
        "schema": 1,
        "created": now(),
        "versions": versions(),
        "calibrations": digest_of(files.calibrations),
        "warmup_steps": WARMUP,
        "engine": engine,
        "environments": {environment.name: _environment(files, environment, leg_s, engine) for environment in environments},
    }


def _environment(files: Files, environment: Environment, leg_s: float, engine: Engine) -> Entry:
    inside, profile = links_of(files, environment.calibrated_at)
    assert profile.communication is not None
    between = profile.communication.link
    cells = {}
    for name, strategy in environment.strategies.items():
        simulated = _Simulated(environment, strategy, inside, profile, engine)
        cells[name] = _cell(simulated, leg_s) | {"calibrated": name in CALIBRATING}
    return {
        "place": environment.place.name,
        "calibrated_at": environment.calibrated_at.name,
        "bandwidth_bps": between.bandwidth,
        "latency_ns": between.latency,
        "cells": cells,
    }


@dataclass(frozen=True, slots=True)
class _Simulated:
    """One cell by one engine."""

    environment: Environment
    strategy: DistributedStrategy
    inside: Link | None
    profile: Profile
    engine: Engine

    def run(self, steps: int) -> RunResult:
        """With the fitted link in place of the declared one, which the testbed builds, and no override: see ``calibrated_at``."""
        experiment = self.environment.experiment(self.strategy, steps)
        cluster = dataclasses.replace(experiment.cluster, inter=None, intra=self.inside, node_overrides=())
        with TemporaryDirectory() as folder:
            named = name_profile(experiment.replace(cluster=cluster), self.profile, Path(folder) / "profile.toml")
            return simulate(named, timeline=False, engine=self.engine)


def _cell(simulated: _Simulated, leg_s: float) -> Entry:
    steps, profile = simulated.environment.steps, simulated.profile
    if steps is None:
        pilot = simulated.run(2 * WARMUP)
        steps = num_steps(pilot.summary.wall_s / pilot.summary.steps, leg_s)
    run = simulated.run(steps)
    assert profile.communication is not None
    said = rivals(run, declared_table(run.experiment.workload), simulated.inside, profile.communication.link)
    return {
        "steps": steps,
        "buckets": len(run.plan.buckets),
        "sim": measures(run),
        "rivals": {name: dataclasses.asdict(value) for name, value in said.items()},
        "plan": run.plan.digest,
        "by": run.summary.engine,
    }


def measures(run: RunResult) -> dict[str, Any]:
    """What of a run enters the tables, and its steps: of every phase the mean over ranks, in us."""
    summary = run.summary
    counted = run.steps[run.steps["step"] >= 1]
    series = {name: counted[list(columns)].sum(axis=1).groupby(counted["step"]).mean() for name, columns in PHASES.items()}
    return {
        "wall_s": summary.wall_s,
        "compute_s": summary.compute_s,
        "wait_s": summary.wait_s,
        "exposed_comm_s": summary.exposed_comm_s,
        "update_s": summary.update_s,
        "other_s": summary.other_s,
        "bytes_sent": summary.bytes_sent_per_trainer,
        "num_syncs": summary.num_syncs,
        "series_us": {name: [round(1e6 * float(value)) for value in values.sort_index()] for name, values in series.items()},
    }
