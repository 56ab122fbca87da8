"""simulate: how long an experiment will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.result import Outcome, RunResult, steps_table, summarise
from fleetbench.store import new_run_id
from sim.reference import execute
from sim.scenario import Scenario, not_realised


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
    outcome = Outcome(executor="sim", run_id=new_run_id(), skipped=not_realised(experiment))
    return RunResult(
        experiment=experiment,
        summary=summarise(experiment, table, outcome),
        steps=table,
        plan=scenario.plan,
        spans=execution.spans if timeline else (),
        recordings=execution.recordings,
        host_s=time.perf_counter() - begin_s,
    )
