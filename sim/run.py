"""simulate: how long an experiment will take, by one of two engines.

- ``reference``: event by event, on SimPy's clock; it supports every scenario
- ``vector``: max-plus recursions over arrays of ranks, equal to the reference in every nanosecond; ``auto``
  is an alias

The reference always runs scenarios that the vector engine does not support, and runs that keep recordings.
The summary's ``engine`` gives the reason.
"""

import dataclasses
import time
from collections.abc import Callable, Collection
from typing import Any, Literal, get_args

import pandas as pd

from fleetbench.declared import curve_loss, declared_crossing
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.result import MOST_ROWS, STEPS_FILE, RunResult, no_steps, skip, summarise, summary_of, takes_no_time
from fleetbench.store import new_run_id
from fleetbench.timeline import MOST_EVENTS, TIMELINE_FILE
from sim.execution import Execution, Wanted
from sim.learning.trajectory import WHO, Trajectory, key_of
from sim.limits import MOST_REMEMBERED, at_most
from sim.scenario import Scenario, memory_of, not_realised, short_of_memory
from sim.servers.actor import Order
from sim.servers.simulate import simulate_servers

Engine = Literal["auto", "reference", "vector"]
ENGINES: tuple[str, ...] = get_args(Engine)


def simulate(
    experiment: Experiment,
    *,
    progress: Callable[[int, int], None] | None = None,
    record: bool = False,
    timeline: bool = True,
    spared: Collection[int] = (),
    engine: Engine = "auto",
    table: bool | None = None,
    learnt: Trajectory | None = None,
) -> RunResult:
    """Execute an experiment on a simulated clock. The same experiment gives the same steps, bit for bit.

    Args:
        experiment: its layer table and links are declared, or come from the profile that it names.
        progress: called with the number of steps that rank 0 has done, and of all its steps; both with warm-up.
        record: keep every rank's events and operations in ``recordings``; with servers, every role's.
        timeline: keep ``spans``, of which there may be a million.
        spared: ranks that no straggler delays, whatever the experiment says; see ``sim.many.what_if``.
        engine: name of the engine; see the module. Parameter servers run only in the reference engine.
        table: keep ``steps``; by default only if it has at most five million rows.
        learnt: results of this experiment's virtual trainers; their losses replace declared ones.

    Raises:
        ConfigError: all trainers together have more than ten billion steps, a field is changed that the
            simulator does not execute, a layer table or link is missing, nothing takes time, or a run is too
            large for the reference engine.
    """
    begin_s = time.perf_counter()
    num_steps = experiment.workload.steps + experiment.run.warmup_steps
    rows = experiment.cluster.trainers * num_steps
    wanted = Wanted(table=rows <= MOST_ROWS if table is None else table, most_spans=MOST_EVENTS if timeline else 0, recordings=record)

    def step_done(done: int) -> None:
        if progress is not None:
            progress(done, num_steps)

    is_served = experiment.strategy.mode == "ps"
    if is_served:
        if spared:
            raise ConfigError('does not work with strategy.mode = "ps"', "spared", str(sorted(spared)), "leave it out")
        execution, memory = _execute_servers(experiment, wanted, engine, step_done, learnt), None
    else:
        _check_learnt(experiment, learnt)
        scenario = Scenario.of(experiment, spared, learnt=learnt)
        if table:
            at_most(rows, MOST_REMEMBERED, "rows", "--table", "drop --table: the summary has means and quantiles")
        held = memory_of(experiment, scenario.plan)
        execution, memory = _execute(scenario, wanted, engine, step_done), None if held is None else sum(held.values())
    if execution.end_ns == 0:
        raise takes_no_time()
    skipped = [*not_realised(experiment, learnt=learnt is not None), *short_of_memory(experiment, memory), *execution.notes]
    if execution.no_spans is not None:
        skipped.append(skip(TIMELINE_FILE, execution.no_spans))
    if table is None and not wanted.table:
        skipped.append(skip(STEPS_FILE, f"{rows:,} rows, and above {MOST_ROWS:,} they are written only when asked: --table"))
    final_loss, loss_from = _final_loss(experiment, learnt)
    known: dict[str, Any] = {
        "executor": "sim",
        "engine": execution.engine,
        "run_id": new_run_id(),
        "memory_bytes": memory,
        "final_loss": final_loss,
        "loss_from": loss_from,
        **({} if is_served and learnt is None else _to_target(experiment, execution, learnt)),
        "skipped": skipped,
        "staleness": execution.staleness,
        "server_load": execution.server_load,
    }
    if not is_served:
        known["wall_s"] = (execution.end_ns - execution.begin_ns) / 1e9
    steps = no_steps() if execution.table is None else execution.table
    totals = execution.totals
    return RunResult(
        experiment=experiment,
        summary=summarise(experiment, steps, **known) if totals is None else summary_of(experiment, totals, **known),
        steps=_with_losses(steps, learnt) if wanted.table else no_steps(),
        plan=execution.plan,
        spans=execution.spans,
        recordings=execution.recordings,
        held_out=() if learnt is None else learnt.held_out,
        host_s=time.perf_counter() - begin_s,
    )


def _check_learnt(experiment: Experiment, learnt: Trajectory | None, order: Order | None = None) -> None:
    if learnt is not None and learnt.key != key_of(experiment, order):
        raise ConfigError("belongs to another training", "learnt", learnt.key, "train this experiment's virtual trainers")


def _execute_servers(
    experiment: Experiment, wanted: Wanted, engine: Engine, step_done: Callable[[int], None], learnt: Trajectory | None
) -> Execution:
    if learnt is None:
        return simulate_servers(experiment, wanted, engine, step_done)
    from sim.learning.served import served_job  # torch, which a simulation without losses does not need

    order = Order()
    execution = simulate_servers(experiment, wanted, engine, step_done, served_job(experiment), order)
    _check_learnt(experiment, learnt, order)
    return execution


def _execute(scenario: Scenario, wanted: Wanted, engine: Engine, step_done: Callable[[int], None]) -> Execution:
    """Run all trainers to their last step.

    Raises ``ConfigError`` for an unknown engine, and for a run with too many events for the reference engine.
    """
    from sim.arrays import engine as vector
    from sim.arrays.supported import Unsupported
    from sim.reference import engine as reference

    if engine not in ENGINES:
        raise ConfigError("no such engine", "engine", repr(engine), f"one of {', '.join(ENGINES)}")
    if engine == "reference":
        return reference.execute(scenario, wanted, step_done)
    why = "only the reference keeps recordings"
    if not wanted.recordings:
        try:
            return vector.execute(scenario, wanted, step_done)
        except Unsupported as reason:
            why = str(reason)
    return dataclasses.replace(reference.execute(scenario, wanted, step_done), engine=f"reference: {why}")


def _with_losses(steps: pd.DataFrame, learnt: Trajectory | None) -> pd.DataFrame:
    return steps if learnt is None else steps.assign(loss=learnt.losses[steps["step"] - learnt.first_step, steps["rank"]])


def _final_loss(experiment: Experiment, learnt: Trajectory | None) -> tuple[float | None, str | None]:
    """Return the loss after the last step, and its source."""
    if learnt is not None:
        return learnt.final_loss, WHO
    curve = None if experiment.strategy.a_sync else experiment.workload.loss_curve
    return (None, None) if curve is None else (curve_loss(curve, experiment.workload.steps), "a declared curve")


def _to_target(experiment: Experiment, execution: Execution, learnt: Trajectory | None) -> dict[str, float]:
    """Return the seconds and steps until the last rank reaches the target loss, by ``Summary``'s names.

    The result is empty if the target is not reached.
    """
    workload = experiment.workload
    reached = declared_crossing(workload) if learnt is None else learnt.crossing(workload.target_loss)
    if reached is None:
        return {}
    seconds = (execution.step_ends_ns[reached.step] - execution.begin_ns) / 10**9
    return {"time_to_target_s": seconds, "steps_to_target": reached.smooth}
