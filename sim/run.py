"""simulate: how long an experiment will take, by one of two engines.

- ``reference``: event by event, on SimPy's clock; every scenario.
- ``vector``: max-plus recursions over arrays of ranks, equal to the reference in every nanosecond. ``auto`` is the same.

What the vector engine does not execute, and recordings, the reference does; the summary's ``engine`` says why.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Literal, get_args

from fleetbench.declared import target_step
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.profile import Profile
from fleetbench.result import MOST_ROWS, STEPS_FILE, Outcome, RunResult, no_steps, skip, summarise, summary_of, takes_no_time
from fleetbench.store import new_run_id
from fleetbench.timeline import MOST_EVENTS, TIMELINE_FILE
from sim.execution import Execution, Wanted
from sim.limits import MOST_REMEMBERED, at_most
from sim.scenario import Scenario, not_realised
from sim.servers.simulate import simulate_servers

Engine = Literal["auto", "reference", "vector"]
ENGINES: tuple[str, ...] = get_args(Engine)


def simulate(
    experiment: Experiment,
    *,
    profile: Profile | None = None,
    progress: Callable[[int, int], None] | None = None,
    record: bool = False,
    timeline: bool = True,
    spared: Collection[int] = (),
    engine: Engine = "auto",
    table: bool | None = None,
) -> RunResult:
    """Execute an experiment on a simulated clock. The same experiment gives the same steps, bit for bit.

    Args:
        experiment: what to run; its layer table and links are declared, or come from the profile.
        profile: measured layer tables and links; default: the file ``workload.profile``.
        progress: called as steps of rank 0 are done with how many are, and with all steps, warm-up included.
        record: keep every rank's events and operations in ``recordings``; with parameter servers, every role's in ``roles``.
        timeline: keep ``spans``, of which there may be a million.
        spared: ranks that no straggler delays, whatever the experiment says; see ``sim.many.what_if``.
        engine: who executes it; see the module. Parameter servers have the reference alone.
        table: keep ``steps``; by default where it has no more than five million rows.

    Raises:
        ConfigError: there are more than ten billion steps of all trainers together, a field is changed that the simulator does not
            execute, a layer table, link or rank is not known, nothing takes time, or a run is too large for the reference engine.
    """
    if experiment.strategy.mode == "ps":
        if spared:
            what = 'does not go with strategy.mode = "ps", whose trainers do not meet'
            raise ConfigError(what, "spared", str(sorted(spared)), "leave it out")
        return simulate_servers(
            experiment, profile=profile, progress=progress, record=record, timeline=timeline, engine=engine, table=table
        )
    begin_s = time.perf_counter()
    scenario = Scenario.of(experiment, profile, spared)
    rows = scenario.plan.trainers * len(scenario.steps)
    if table:
        at_most(rows, MOST_REMEMBERED, "rows", "--table", "drop --table: the summary has means and quantiles")
    wanted = Wanted(table=rows <= MOST_ROWS if table is None else table, most_spans=MOST_EVENTS if timeline else 0, recordings=record)

    def step_done(done: int) -> None:
        if progress is not None:
            progress(done, len(scenario.steps))

    execution = _execute(scenario, wanted, engine, step_done)
    if execution.end_ns == 0:
        raise takes_no_time()
    outcome = Outcome(
        executor="sim",
        engine=execution.engine,
        run_id=new_run_id(),
        wall_s=(execution.end_ns - execution.begin_ns) / 1e9,
        final_loss=scenario.scalars.declared_loss(experiment.workload.steps),
        time_to_target_s=_time_to_target_s(experiment, execution),
        skipped=[*not_realised(experiment), *_left_out(execution, wanted, rows, is_asked_for=table is not False)],
    )
    steps = no_steps() if execution.table is None else execution.table
    totals = execution.totals
    summary = summarise(experiment, steps, outcome) if totals is None else summary_of(experiment, totals, outcome)
    return RunResult(
        experiment=experiment,
        summary=summary,
        steps=steps if wanted.table else no_steps(),
        plan=scenario.plan,
        spans=execution.spans,
        recordings=execution.recordings,
        host_s=time.perf_counter() - begin_s,
    )


def _execute(scenario: Scenario, wanted: Wanted, engine: Engine, step_done: Callable[[int], None]) -> Execution:
    """Run all trainers to their last step; ``step_done`` is told how many steps are done.

    Raises ``ConfigError`` for an unknown engine, and for more events than the reference engine takes.
    """
    from sim.arrays import execute as vector
    from sim.reference import engine as reference

    if engine not in ENGINES:
        raise ConfigError("no such engine", "engine", repr(engine), f"one of {', '.join(ENGINES)}")
    if engine == "reference":
        return reference.execute(scenario, wanted, step_done)
    found = "it records what every rank is told" if wanted.recordings else vector.execute(scenario, wanted, step_done)
    if isinstance(found, Execution):
        return found
    return dataclasses.replace(reference.execute(scenario, wanted, step_done), engine=f"reference: {found}")


def _no_rows(rows: int) -> dict[str, str]:
    return skip(STEPS_FILE, f"{rows:,} rows, and above {MOST_ROWS:,} they are written only when asked: --table")


def _left_out(execution: Execution, wanted: Wanted, rows: int, *, is_asked_for: bool) -> list[dict[str, str]]:
    """The entries of ``skipped`` for a timeline and a table that were not kept, where the caller did not leave them out himself."""
    found = []
    if wanted.most_spans and execution.no_spans is not None:
        found.append(skip(TIMELINE_FILE, execution.no_spans))
    if not is_asked_for or (wanted.table and execution.table is not None):
        return found
    return [*found, _no_rows(rows)]


def _time_to_target_s(experiment: Experiment, execution: Execution) -> float | None:
    """Seconds from the first counted start to the end, on the last rank, of the step that reaches the target by the declared curve."""
    reached = target_step(experiment.workload)
    return None if reached is None else (execution.step_ends_ns[reached] - execution.begin_ns) / 10**9
