"""Measure: one experiment on real processes."""

from __future__ import annotations

from collections.abc import Callable

from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.result import RunResult
from real.foreign_load import quietest
from real.leg import Leg
from real.session import Session


def measure(
    experiment: Experiment,
    *,
    profile: Profile | None = None,
    progress: Callable[[int, int], None] | None = None,
    record: bool = False,
) -> RunResult:
    """Run the experiment from its initial parameters, with as many processes as it has trainers; again where the machine was busy.

    Reads ``workload.profile`` when no profile is given and the file names one. Raises
    ``ConfigError`` for what cannot be executed, ``WorkerFailed`` naming the rank.
    """
    if profile is None and experiment.workload.profile is not None:
        profile = Profile.load(experiment.workload.profile)
    leg = Leg(
        strategy=experiment.strategy,
        steps=experiment.workload.steps,
        warmup_steps=experiment.run.warmup_steps,
        start="initial",
        evaluate=True,
        record=record,
    )
    with Session(experiment, profile) as session:
        return quietest(lambda: session.run(leg, progress), lambda run: run.summary.foreign_cores)
