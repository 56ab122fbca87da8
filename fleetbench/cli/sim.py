"""``fleetbench sim``: how long will an experiment take?

``--seeds``, ``--what-if`` and ``--sweep`` simulate several runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from functools import partial
from typing import TYPE_CHECKING, Any

from fleetbench import units
from fleetbench.cli import progress
from fleetbench.cli.options import (
    Commands,
    add_command,
    add_experiment,
    add_json,
    add_on,
    add_strategy,
    check_writable,
    load_experiment,
    load_with_notes,
    with_profile,
)
from fleetbench.cli.output import emit, emit_table, new_table, say, table_of
from fleetbench.errors import ConfigError
from fleetbench.quantities import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.table import Table

    from fleetbench.experiment import Experiment
    from sim.learning.trajectory import Trajectory
    from sim.many.seeds import OverSeeds
    from sim.many.sweep import Sweep

_COLUMNS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("trainers", "trainers", "{:,.0f}".format),
    ("samples_per_s", "samples/s", "{:,.0f}".format),
    ("step_s", "step", units.seconds),
    ("wait_s", "wait", units.seconds),
    ("exposed_comm_s", "exposed", units.seconds),
    ("tokens_per_s", "tokens/s/GPU", "{:,.0f}".format),
    ("mfu", "MFU", units.percent),
    ("memory_bytes", "memory", units.size),
    ("final_loss", "final loss", "{:.4g}".format),
    ("time_to_target_s", "to target", units.seconds),
)
"""Columns of a sweep's table: key, heading, and formatter of the values."""


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "sim", "simulate an experiment: how long will it take?", run)
    add_experiment(parser)
    add_strategy(parser)
    add_json(parser, "the run's summary.json, or the results of several runs,")
    parser.add_argument(
        "--engine",
        choices=("auto", "reference", "vector"),
        default="auto",
        help="engine: reference (event by event) or vector (arrays of ranks), equal to the nanosecond; default: auto",
    )
    loss = "train virtual trainers first: final loss, time to workload.target_loss, and the K of adaptive steps"
    parser.add_argument("--loss", action="store_true", help=loss)
    parser.add_argument("--table", action="store_true", help="write steps.parquet even above five million rows")
    several = parser.add_mutually_exclusive_group()
    seeds = "simulate under N seeds, and print means with 95 %% intervals"
    several.add_argument("--seeds", type=int, metavar="N", help=seeds)
    several.add_argument(
        "--what-if",
        action="store_true",
        help="also simulate without stragglers, the slowest rank or node, and with infinite bandwidth",
    )
    several.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V1,V2,...",
        help="simulate at each value of a key, such as cluster.nodes=1,2,4,8 or 1..8; twice for two keys; writes a table",
    )
    add_on(parser, "the simulations of --seeds, --what-if and --sweep")
    parser.set_defaults(interrupted="the simulation was stopped, and no run was stored")


def run(arguments: argparse.Namespace) -> int:
    """Simulate a run, store it, and print its summary; or simulate several runs, and print their results."""
    if arguments.seeds is not None or arguments.what_if or arguments.sweep:
        return _run_several(arguments)
    if arguments.on != "local":
        hint = "drop it, or simulate several runs: --seeds 10"
        raise ConfigError("is for the simulations of --seeds, --what-if and --sweep", "--on", arguments.on, hint)
    experiment = _with_times(load_experiment(arguments), arguments)
    from fleetbench.store import save_run
    from sim.run import simulate

    found = None
    if experiment.cluster.churn is not None:  # first: what it refuses then costs no training and no run
        from sim.churn.goodput import goodputs

        found = goodputs(experiment)
    learnt = None
    if (learn := _learn(arguments)) is not None:
        with progress.steps("train virtually") as advance:
            learnt = learn(experiment, advance)
    with progress.steps("simulate") as advance:
        result = simulate(experiment, progress=advance, engine=arguments.engine, table=arguments.table or None, learnt=learnt)
    if found is not None:
        from fleetbench.config import encode

        result = dataclasses.replace(result, summary=dataclasses.replace(result.summary, churn=encode(found)))
    result = save_run(result, arguments.out)
    if arguments.json:
        emit(result.summary.to_json())
        say(f"run: {result.path}")
        return 0
    from fleetbench.cli import tables

    tables.print_runs({"simulated": result.summary}, result.experiment)
    if found is not None:
        tables.print_goodput(found, experiment.cluster)
    if result.summary.engine is not None:
        emit(f"engine: {result.summary.engine}")
    emit(f"run: {result.path}")
    return 0


def _learn(arguments: argparse.Namespace) -> Callable[..., Trajectory] | None:
    """Return the function that trains virtual trainers, if the command line asks for losses."""
    if not arguments.loss:
        return None
    from sim.learning.virtual_training import train

    return partial(train, say=say)


def _with_times(experiment: Experiment, arguments: argparse.Namespace) -> Experiment:
    """Return the experiment with known layer times.

    With ``--loss``, settings that virtual trainers do not execute are refused before anything is measured.
    """
    if arguments.loss:
        from sim.learning.trajectory import learnt_from

        learnt_from(experiment)
    return with_profile(experiment, arguments.out)


def _run_several(arguments: argparse.Namespace) -> int:
    if arguments.table:
        asked = "--sweep" if arguments.sweep else "--what-if" if arguments.what_if else "--seeds"
        raise ConfigError(f"no run of {asked} is stored, so none has a steps.parquet", "--table", hint="drop it, or simulate one run")
    if arguments.sweep:
        return _sweep(arguments)
    if arguments.what_if and arguments.loss:
        raise ConfigError("compares times, which losses do not change", "--what-if", hint="leave --loss out, or --what-if")
    from sim.many.seeds import check_number, over_seeds

    if arguments.seeds is not None:
        check_number(arguments.seeds)
    experiment = _with_times(load_experiment(arguments), arguments)
    if arguments.what_if:
        return _what_if(experiment, arguments)

    with progress.steps("simulate seeds") as advance:
        found = over_seeds(experiment, arguments.seeds, engine=arguments.engine, progress=advance, learn=_learn(arguments), on=arguments.on)
    if arguments.json:
        emit(json.dumps(found.to_dict(), indent=1, allow_nan=False))
    else:
        emit_table(_seeds_table(found))
    return 0


def _what_if(experiment: Experiment, arguments: argparse.Namespace) -> int:
    from sim.many.what_if import what_if

    with progress.steps("simulate what if") as advance:
        cases = what_if(experiment, engine=arguments.engine, progress=advance, on=arguments.on)
    if arguments.json:
        emit(json.dumps({"name": experiment.name, "cases": [case.to_dict() for case in cases]}, indent=1))
        return 0
    from fleetbench.utilisation import Utilisation

    size = f"{experiment.cluster.trainers} trainers, {experiment.workload.steps} steps{experiment.cluster.said_of_stragglers}"
    table = new_table(f"{experiment.name}: {size}", "", "whole run", "step, mean", "gain")
    table.caption = "without a rank or node: it trains on, and is never late; with neither: no stragglers, and infinite bandwidth"
    for case in cases:
        table.add_row(case.name, units.seconds(case.summary.wall_s), units.seconds(case.summary.step_s["mean"]), units.ratio(case.gain))
    emit_table(table)
    emit(Utilisation(**(cases[0].summary.per_trainer or {})).line)
    return 0


def _sweep(arguments: argparse.Namespace) -> int:
    from fleetbench.cli.tables import target_of
    from fleetbench.store import new_run_id
    from sim.many.sweep import Axis, sweep

    axes = [Axis.parse(text) for text in arguments.sweep]
    check_writable(arguments.out)
    said, headings = set[str](), set[str]()

    def load(more: Sequence[str]) -> Experiment:
        experiment, notes = load_with_notes(arguments, more)
        for text in notes:
            if text not in said:  # once, not at every point
                say(f"note: {text}")
        said.update(notes)
        target = target_of(experiment) if arguments.loss else ""
        headings.add(f", {counted(experiment.workload.steps, 'step')}{target}{experiment.cluster.said_of_stragglers}")
        return experiment

    with progress.steps("simulate points") as advance:
        prepare = partial(_with_times, arguments=arguments)
        found = sweep(load, axes, engine=arguments.engine, progress=advance, prepare=prepare, learn=_learn(arguments), on=arguments.on)
    table = arguments.out / f"{found.name}-sweep-{new_run_id()}" / "sweep.parquet"
    table.parent.mkdir(parents=True)
    found.table.to_parquet(table, index=False)
    if arguments.json:
        points = json.loads(found.table.to_json(orient="records", double_precision=15))
        emit(json.dumps({"name": found.name, "points": points, "note": found.note, "table": str(table)}, indent=1))
        return 0
    emit_table(_sweep_table(found, "".join(headings) if len(headings) == 1 else ""))
    if found.note is not None:
        emit(f"note: {found.note}")
    emit(f"table: {table}")
    return 0


def _seeds_table(found: OverSeeds) -> Table:
    from fleetbench.cli.tables import TIMES, target_of

    first = found.summaries[0]
    target = "" if first.loss_from is None else target_of(found.experiment)
    size = f"{first.trainers} trainers, {first.steps} steps, {len(found.seeds)} seeds"
    table = new_table(f"{first.name}: {size}{target}{found.experiment.cluster.said_of_stragglers}", "", "mean", "95 % interval")
    intervals = found.intervals
    for name, label in TIMES:
        if (interval := intervals.get(name)) is not None:
            mean, low, high = (units.seconds(round(value, 12) + 0.0) for value in (interval.mean, interval.low, interval.high))
            table.add_row(label, mean, f"{low} to {high}")
    rate = intervals["samples_per_s"]
    table.add_row("samples per second", f"{rate.mean:,.0f}", f"{rate.low:,.0f} to {rate.high:,.0f}")
    if (mfu := intervals.get("per_trainer.mfu")) is not None:
        table.add_row("MFU", *(units.percent(mfu.mean), f"{units.percent(mfu.low)} to {units.percent(mfu.high)}"))
    if first.loss_from is not None:
        loss = intervals.get("final_loss")  # a training run that diverged has no loss
        table.add_row("final loss", *((f"{loss.mean:.4g}", f"{loss.low:.4g} to {loss.high:.4g}") if loss else (units.NONE, "")))
        median = units.seconds(found.median_to_target_s)
        table.add_row("time to target, median", median, f"reached by {found.num_reached} of {len(found.seeds)}")
        table.caption = f"losses: from {first.loss_from}"
    return table


def _sweep_table(found: Sweep, heading: str) -> Table:
    rows = list[dict[str, str | None]]()
    for row in found.table.astype(object).where(found.table.notna(), None).to_dict(orient="records"):
        rows.append({axis.key: units.number(row[axis.key]) for axis in found.axes})
        rows[-1] |= {title: None if row.get(name) is None else spell(row[name]) for name, title, spell in _COLUMNS}
    return table_of(f"{found.name}: {len(found.table)} points{heading}", rows)
