"""simulate: how long an experiment will take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count

from fleetbench.declared import target_step
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.result import Outcome, RunResult, StepRecord, steps_table, summarise
from fleetbench.store import new_run_id
from sim.reference import execute
from sim.scenario import Scenario, not_realised
from sim.servers.simulate import simulate_servers


def simulate(
    experiment: Experiment,
    *,
    profile: Profile | None = None,
    progress: Callable[[int, int], None] | None = None,
    record: bool = False,
    timeline: bool = True,
) -> RunResult:
    """Execute an experiment on a simulated clock. The same experiment gives the same steps, bit for bit.

    Args:
        experiment: what to run; its layer table and links are declared, or come from the profile.
        profile: measured layer tables and links; default: the file ``workload.profile``.
        progress: called at every end of a step of rank 0 with the steps done and all steps, warm-up included.
        record: keep every rank's events and operations in ``recordings``.
        timeline: keep ``spans``.

    Raises:
        ConfigError: a field is changed that the simulator does not execute, a layer table or link is not known, or nothing takes time.
    """
    if experiment.strategy.mode == "ps":
        return simulate_servers(experiment, profile=profile, progress=progress, timeline=timeline)
    begin_s = time.perf_counter()
    scenario = Scenario.of(experiment, profile)
    done = count(1)

    def step_done() -> None:
        if progress is not None:
            progress(next(done), len(scenario.steps))

    execution = execute(scenario, record=record, step_done=step_done)
    if execution.records[-1].end_ns == 0:
        raise ConfigError("the run takes no time at all", "workload.layers", hint="give the layers a forward or backward above 0 ns")
    table = steps_table(execution.records)
    outcome = Outcome(
        executor="sim",
        run_id=new_run_id(),
        final_loss=scenario.scalars.declared_loss(experiment.workload.steps),
        time_to_target_s=_time_to_target_s(experiment, execution.records),
        skipped=not_realised(experiment),
    )
    return RunResult(
        experiment=experiment,
        summary=summarise(experiment, table, outcome),
        steps=table,
        plan=scenario.plan,
        spans=execution.spans if timeline else (),
        recordings=execution.recordings,
        host_s=time.perf_counter() - begin_s,
    )


def _time_to_target_s(experiment: Experiment, records: Sequence[StepRecord]) -> float | None:
    """Seconds from the first counted start to the end, on the last rank, of the step that reaches the target by the declared curve."""
    reached = target_step(experiment.workload)
    if reached is None:
        return None
    begin_ns = min(record.start_ns for record in records if record.step >= 1)
    return (max(record.end_ns for record in records if record.step == reached) - begin_ns) / 10**9
