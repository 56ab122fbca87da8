"""``fleetbench tune``: which strategy should I use? ``--simulate-only``: which one on a cluster that I do not have?"""

from __future__ import annotations

import argparse
import itertools
import json
import textwrap
from dataclasses import asdict
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbench import units
from fleetbench.cli import progress, your_script
from fleetbench.cli.options import (
    Commands,
    add_command,
    add_command_line,
    add_experiment,
    add_json,
    add_on,
    add_strategy,
    load_experiment,
    load_with_notes,
)
from fleetbench.cli.output import columns, emit, emit_table, new_table, say, table_of
from fleetbench.errors import ConfigError
from fleetbench.quantities import hours_or_days

if TYPE_CHECKING:
    from rich.table import Table

    from fleetbench.experiment import Experiment
    from fleetbench.strategy import DistributedStrategy
    from tuner.recommendation import Recommendation
    from tuner.simulated.answer import SimulatedRecommendation
    from tuner.simulated.churn import UnderChurn
    from tuner.simulated.sizes import Size, Sizes


_STAGES = ("profile", "search", "run", "verify")
_ITEM: Any = {"initial_indent": "- ", "subsequent_indent": "  ", "break_on_hyphens": False, "break_long_words": False}


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "tune", "search the simulator, check with real runs, recommend: what should I use?", run)
    add_experiment(parser)
    add_strategy(parser)
    add_json(parser, "the recommendation")
    parser.add_argument("--simulate-only", action="store_true", help="run nothing: the answer for a cluster that you do not have")
    sweep = "with --simulate-only: the best strategy at each value of a key, such as cluster.nodes=1,2,4 or 1..8; twice: at every pair"
    parser.add_argument("--sweep", metavar="KEY=V1,V2,...", action="append", help=sweep)
    text = "continue from this earlier tuning's folder: report what has changed since, and measure only what that affects"
    parser.add_argument("--from", dest="earlier", type=Path, metavar="FOLDER", help=text)
    parser.add_argument("-v", "--verbose", action="store_true", help="print why others were not chosen, and all notes, as in the report")
    add_on(parser, "the simulations of a search")
    add_command_line(parser)
    parser.epilog = your_script.EPILOG
    parser.set_defaults(interrupted="what ran was stopped; the same command continues after what is complete")


def run(arguments: argparse.Namespace) -> int:
    """Tune, write the report, and print the verdict and the folder. The exit status of KEEP DEFAULT is also 0."""
    if _asks_for_simulations(arguments):
        if arguments.earlier is not None:
            raise ConfigError("does not go with --simulate-only, which measures nothing", "--from", str(arguments.earlier), "drop it")
        return _run_simulated(arguments)
    arguments.command_line = arguments.command_line or your_script.command_of_job(arguments)
    if arguments.command_line:
        arguments.interrupted = "the script was stopped; its profile was not complete, so that nothing is kept"
        return your_script.drive_script(arguments, _tune_script)
    your_script.refuse_workdir(arguments)
    experiment = load_experiment(arguments)
    from tuner.tune import tune

    with progress.numbered(*_STAGES) as advance:
        recommendation, folder = tune(experiment, out=arguments.out, progress=advance, earlier=arguments.earlier, on=arguments.on)
    return show(recommendation, folder, arguments)


def _tune_script(arguments: argparse.Namespace, command: tuple[str, ...], base: Experiment) -> int:
    from tuner.jobs import Script
    from tuner.tune import tune

    def begun() -> None:
        arguments.interrupted = "the script was stopped; the same command continues after the last complete leg"

    say(your_script.budget(base.tune))
    your_script.note_files(arguments)
    with progress.numbered(*_STAGES) as advance:
        script, known = Script(tuple(command), arguments.workdir), {"out": arguments.out, "earlier": arguments.earlier, "on": arguments.on}
        recommendation, folder = tune(base, script=script, **known, progress=advance, begun=begun)
    return show(recommendation, folder, arguments)


def show(recommendation: Recommendation, folder: Path, arguments: argparse.Namespace) -> int:
    """Write a tuning's report, and print the answer.

    With ``-v``, also print why others were not chosen, and all notes.
    """
    from fleetbench.report.answer import text_of
    from fleetbench.report.html import save_report
    from fleetbench.report.model import read_report

    report = read_report(folder)
    path = save_report(report, folder)
    assert report.tune is not None
    if arguments.json:
        emit(json.dumps({"verdict": recommendation.verdict, "answer": asdict(report.tune.answer)} | recommendation.plain(), indent=1))
        say(f"recommendation: {folder / 'recommended.toml'}\nreport: {path}")
        return 0
    emit(text_of(report.tune.answer, columns()))
    if arguments.verbose:
        for name, reason in report.tune.answer.not_chosen:
            emit(textwrap.fill(f"not chosen: {name}: {reason}", columns(), subsequent_indent="  "))
        for heading, notes in itertools.groupby(sorted(report.notes, key=attrgetter("kind")), attrgetter("kind")):
            emit("\n".join([f"\n{heading}", *(textwrap.fill(f"{note}", columns(), **_ITEM) for note in notes)]))
    return 0


def _asks_for_simulations(arguments: argparse.Namespace) -> bool:
    """Return whether ``--simulate-only`` is given.

    Raises ``ConfigError`` for options that contradict it, or that need it.
    """
    if not arguments.simulate_only:
        if arguments.sweep is not None:
            raise ConfigError("needs --simulate-only", "--sweep", repr(arguments.sweep[0]), "add --simulate-only")
        return False
    if len(arguments.sweep or ()) > 2:
        hint = "at most two keys, such as cluster.nodes and workload.batch_size"
        raise ConfigError("is given more than twice", "--sweep", ", ".join(arguments.sweep), hint)
    if arguments.command_line:
        hint = "profile the script, and name its workload.profile in an experiment file"
        raise ConfigError("does not go with a command, which would not be started", "--simulate-only", hint=hint)
    your_script.refuse_workdir(arguments)
    return True


def _run_simulated(arguments: argparse.Namespace) -> int:
    arguments.interrupted = "nothing was running but this command"
    if arguments.sweep is not None:
        return _sweep(arguments)
    from tuner.simulated.answer import tune_simulated

    experiment = load_experiment(arguments)
    with progress.numbered("search", "try", "assume") as advance:
        found, folder = tune_simulated(experiment, out=arguments.out, progress=advance, on=arguments.on)
    if arguments.json:
        emit(json.dumps(found.plain(), indent=1))
        say(f"recommendation: {folder / 'recommended.toml'}")
        return 0
    emit_table(_strategies(found))
    emit_table(_cases(found))
    emit("every row has the draws of the first; stragglers x 2 doubles their delays, and what slowdown in node_overrides has above 1")
    emit(_parts(found, folder))
    emit(found.per_trainer.line)
    emit(_made_of(found))
    parts = ", ".join(f"{name} {units.size(size)}" for name, size in found.memory.items())
    needs = f"; {units.size(sum(found.memory.values()))} per trainer: {parts}" if parts else ""
    emit(f"fits in memory: {_spelled(found.fits_in_memory)}{needs}")
    emit("\n".join(f"note: {note}" for note in found.notes))
    if found.churn is not None:
        emit_table(_choices(found.churn))
        emit("\n".join(f"note: {note}" for note in found.churn.told))
        emit(f"{found.churn.line}\nstrategy: {folder / 'recommended_churn.toml'}")
    emit(found.line)
    emit(f"recommendation: {folder / 'recommended.toml'}")
    return 0


def _choices(found: UnderChurn) -> Table:
    from fleetbench.cli.tables import goodput_cells, goodput_table

    more = ["samples to target"] if found.is_to_target else []
    title = f"under cluster.churn: the best intervals of {len(found.choices)} choices, and Young's and Daly's"
    has_price = found.choices[0].price is not None
    table = goodput_table(title, "policy", "K", *more, has_price=has_price)
    for one in found.rows:
        name = f"{one.goodput.policy}{f', {one.origin}' if one.origin else ''}"
        first = (name, str(one.strategy.local_steps), *[f"{one.samples_to_target:.2f}x"][: len(more)])
        table.add_row(*first, *goodput_cells(one.goodput, one.rate, one.price, has_price=has_price))
    return table


def _strategies(found: SimulatedRecommendation) -> Table:
    title = f"{found.name}: {found.trainers} trainers, SIMULATED, {found.compute}, {found.num_trials} strategies tried"
    to_target = [] if found.target_loss is None else [f"to loss {found.target_loss:g}"]
    table = new_table(title, "", "step", "speed-up", *to_target, "strategy", left=("strategy",))
    gain = found.to_target or found.speedup
    rows = [("the experiment's own", found.default_s, 1.0, None), ("recommended", found.step_s, gain, found.strategy)]
    rivals = enumerate(found.runners_up, start=1)
    rows += [(f"runner-up {number}", rival.step_s, rival.to_target or 1.0, rival.strategy) for number, rival in rivals]
    for name, step_s, sooner, strategy in rows:
        changes = "" if strategy is None else units.changes(strategy.changes())
        table.add_row(name, units.seconds(step_s), units.ratio(found.default_s / step_s), *[units.ratio(sooner)][: len(to_target)], changes)
    return table


def _cases(found: SimulatedRecommendation) -> Table:
    of = "" if found.target_loss is None else f": seconds to loss {found.target_loss:g}"
    title = f"what the answer hangs on{of}"
    table = new_table(title, "if", "own", "recommended", "changes the answer", "keeping it costs", "then best", left=("then best",))
    for case in found.cases:
        best = units.changes(case.best.changes()) if case.changes_answer else ""
        answer = ("yes" if case.changes_answer else "no", units.percent(case.cost), best)
        table.add_row(case.assumption, units.seconds(case.default_s), units.seconds(case.recommended_s), *answer)
    return table


def _parts(found: SimulatedRecommendation, folder: Path) -> str:
    """Describe the parts of a step, and the command that shows their costs."""
    from fleetbench.cli.tables import TIMES

    parts = ", ".join(f"{label.strip()} {units.seconds(found.parts[key])}" for key, label in TIMES if key in found.parts)
    undelayed = (
        f"without stragglers and jitter compute takes {units.seconds(found.parts['undelayed_s'])} ({found.compute.partition(' ')[0]})"
    )
    command = f"fleetbench sim {folder / 'experiment.toml'} --strategy {folder / 'recommended.toml'} --what-if"
    return f"a step: {parts}; {undelayed}\nwhat each costs: {command}"


def _made_of(found: SimulatedRecommendation) -> str:
    rate = f"{found.samples_per_s:,.0f} samples/s" + (f", {found.tokens_per_s:,.0f} tokens/s" if found.tokens_per_s else "")
    if not (found.spread.model or found.spread.seeds):
        return rate
    spread, whose = found.spread, "runner-up 1's" if found.keeps else "the"
    parts = [f"stragglers' draws {units.percent(spread.seeds)} ({found.seeds} seeds)", f"the simulator {units.percent(spread.model)}"]
    if spread.estimate_low or spread.estimate_high:
        parts.append(f"estimated compute -{units.percent(spread.estimate_low)} +{units.percent(spread.estimate_high)}")
    if spread.updates_low:
        parts.append(f"steps to the target -{units.percent(spread.updates_low)} +{units.percent(spread.updates_high)}")
    outside = f"; outside of what was compared with real runs: {', '.join(found.outside)}" if found.outside else ""
    return f"{rate}; the 90 % interval of {whose} speed-up: {', '.join(parts)}{outside}"


def _spelled(fits: bool | None) -> str:
    return {True: "yes", False: "no", None: "unknown"}[fits]


def _sweep(arguments: argparse.Namespace) -> int:
    from fleetbench.config import encode
    from fleetbench.digests import sealed_json, write_whole
    from fleetbench.report import figures
    from fleetbench.store import new_run_id
    from sim.many.sweep import Axis
    from tuner.simulated.sizes import tune_sizes

    axes = [Axis.parse(text) for text in arguments.sweep]
    load_experiment(arguments)  # says its notes
    with progress.steps("sizes") as advance:
        found = tune_sizes(lambda more: load_with_notes(arguments, more)[0], *axes, out=arguments.out, progress=advance, on=arguments.on)
    folder = arguments.out / f"{found.name}-sizes-{new_run_id()}"
    folder.mkdir(parents=True)
    write_whole(folder / "sizes.json", sealed_json(encode(found)))
    figures.save_png(figures.scaling(found), folder / "sizes.png")
    if arguments.json:
        emit((folder / "sizes.json").read_text(encoding="utf-8"))
        return 0
    emit_table(_sizes_table(found))
    first = found.sizes[0]
    for strategy, letter in _letters(found).items():
        emit(f"{letter}: {units.changes(strategy.changes())}")
    emit("efficiency: samples/s of one trainer, as a share of the first row's")
    if (one := found.sizes[0].per_trainer).mfu is not None:
        emit(f"MFU: model FLOPs of a GPU, as a share of {one.peak}")
    if found.price_per_trainer_hour is not None:
        of = "a run to the target" if first.samples else f"{found.priced_samples:.3g} samples"
        emit(f"cost is of {of} at {found.price_per_trainer_hour:g} an hour and trainer")
    for which, size in found.least.items():
        low, high = (hours_or_days(24 * end) for end in size.days_interval)
        spent = "" if size.cost is None else f", at a cost of {size.cost:,.2f}"
        emit(f"{which} at the target: {found.key} = {size.value}, in {hours_or_days(24 * (size.days or 0))} [{low}, {high}]{spent}")
    emit("\n".join(f"note: {note}" for note in found.notes))
    emit(f"table: {folder / 'sizes.json'}\npicture: {folder / 'sizes.png'}")
    return 0


def _sizes_table(found: Sizes) -> Table:
    letters = _letters(found)

    def row(size: Size) -> dict[str, str | None]:
        own = size.per_trainer
        rate = own.samples_per_s if own.tokens_per_s is None else own.tokens_per_s
        memory = units.size(own.memory_bytes) if own.memory_bytes else "unknown"
        return {
            found.key: size.value,
            "trainers": f"{size.trainers:,}",
            "step": units.seconds(size.step_s),
            "own step": units.seconds(size.default_s),
            "samples/s/GPU" if own.tokens_per_s is None else "tokens/s/GPU": f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}",
            "efficiency": units.percent(size.efficiency),
            "MFU": None if own.mfu is None else units.percent(own.mfu),
            "samples to target": None if not size.samples else "{1:.3g} [{0:.3g}, {2:.3g}]".format(*size.samples),
            "takes": None if size.days is None else hours_or_days(24 * size.days),
            "cost": None if size.cost is None else f"{size.cost:,.2f}",
            "memory": memory + (", too much" if size.fits_in_memory is False else ""),
            "strategy": letters[size.strategy],
        }

    return table_of(f"{found.name}: SIMULATED, {found.compute}", [row(size) for size in found.sizes])


def _letters(found: Sizes) -> dict[DistributedStrategy, str]:
    """Return a short name for each strategy in the table of sizes: ``S1``, ``S2``, ..."""
    return {strategy: f"S{number}" for number, strategy in enumerate(dict.fromkeys(size.strategy for size in found.sizes), start=1)}
