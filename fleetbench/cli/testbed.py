"""``fleetbench testbed``: the experiment's cluster in one box: is it as declared, and how fast may it be?"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbench.cli import progress
from fleetbench.cli.execution import load_experiment
from fleetbench.cli.options import add_command, add_experiment, add_json
from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.quantities import format_bandwidth
from fleetbench.report import units

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from fleetbench.cli.options import Commands
    from fleetbench.experiment import Experiment
    from real.testbed.calibration import Ceiling
    from real.testbed.survey import Survey


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "testbed", "build an experiment's cluster on this machine, and measure its links", run)
    add_experiment(parser)
    parser.add_argument("--calibrate", action="store_true", help="find the highest rate that this machine carries for as many hosts")
    add_json(parser, "the findings")
    parser.set_defaults(interrupted="the testbed was taken down")


def run(arguments: argparse.Namespace) -> int:
    """Survey the testbed, or calibrate the machine."""
    experiment = load_experiment(arguments)
    from real.processes.folders import temporary_folder

    with temporary_folder() as folder:
        look = _calibrate if arguments.calibrate else _survey
        return look(experiment, arguments.out, folder, as_json=arguments.json)


def _survey(experiment: Experiment, root: Path, folder: Path, *, as_json: bool) -> int:
    from real.testbed.survey import survey

    with progress.steps("testbed") as advance:
        found = survey(experiment.cluster, root, folder, progress=advance)
    if as_json:
        emit(json.dumps(found.to_dict(), indent=1))
        return 0
    emit_table(links_table(found))
    emit_table(all_reduce_table(found))
    for line in noise_lines(found):
        emit(line)
    return 0


def _calibrate(experiment: Experiment, root: Path, folder: Path, *, as_json: bool) -> int:
    from real.testbed.calibration import calibrate, save
    from real.testbed.survey import require_hosts

    hosts = require_hosts(experiment.cluster)
    with progress.steps("calibrate") as advance:
        ceiling = calibrate(hosts, folder, progress=advance)
    path = save(ceiling, root)
    if as_json:
        emit(json.dumps(ceiling.to_dict(), indent=1))
        say(f"ceiling: {path}")
        return 0
    emit_table(ceiling_table(ceiling))
    for line in ceiling_lines(ceiling):
        emit(line)
    emit(f"ceiling: {path}")
    return 0


def links_table(survey: Survey) -> Table:
    """Every link each way, as declared and as measured."""
    title = f"{survey.hosts} hosts: plain TCP over each link, all at once"
    columns = ("link", "direction", "declared", "expected payload", "measured payload", "error")
    table = new_table(title, *columns, left=("direction",))
    for rate in survey.links:
        cells = (_megabits(rate.expected_bps), _megabits(rate.measured_bps), units.percent(rate.error, sign=True))
        table.add_row(rate.link, rate.direction, format_bandwidth(rate.declared_bps), *cells)
    return table


def all_reduce_table(survey: Survey) -> Table:
    """Gloo's all-reduces against the closed form."""
    alpha = units.seconds(survey.fit.alpha_s)
    table = new_table(f"all-reduce (gloo), closed form with alpha {alpha}", "size", "measured ms", "closed form ms", "error")
    for entry in survey.all_reduces:
        times = (units.milliseconds(entry[name]) for name in ("measured_s", "closed_form_s"))
        table.add_row(units.size(entry["nbytes"]), *times, units.percent(entry["error"], sign=True))
    return table


def noise_lines(survey: Survey) -> list[str]:
    """What the machine did meanwhile, what counts, and what is not there."""
    block = survey.trial.blocks[-1]
    lines = [
        f"noise: {noise_text(block.to_dict())}",
        f"linear model: {'holds' if survey.fit.holds else 'does not hold'} (3 % up to 1 MB, 5 % above)",
    ]
    if survey.trial.num_void:
        lines.append(f"void: {survey.trial.num_void} of {len(survey.trial.blocks)} measurements")
    if not survey.trial.counts:
        lines.append(f"warning: the last one does not count either: {'; '.join(block.void)}")
    lines += [f"refused by the kernel: {entry['what']}: {entry['why']}" for entry in survey.record["refused"]]
    if survey.ceiling_bps is not None:
        lines.append(f"calibrated ceiling: {format_bandwidth(survey.ceiling_bps)}")
    lines += [f"SKIPPED {entry['what']}: {entry['why']}" for entry in survey.skipped]
    return lines


def noise_text(block: Mapping[str, Any]) -> str:
    """One block's noise in a line."""
    noise = block["noise"]
    moved = block["sentinel_after_s"] / block["sentinel_before_s"] - 1.0
    return (
        f"foreign user time {units.percent(noise['foreign_cores'])} of a core, stolen {units.percent(noise['stolen_cores'])}, "
        f"TCP retransmits {noise['retransmits']}, timeouts {noise['timeouts']}, reorderings {noise['reorders']}, "
        f"sentinel moved {units.percent(moved, sign=True)}"
    )


def run_lines(record: Mapping[str, Any]) -> list[str]:
    """A run's ``testbed.json`` in a line or two."""
    worst = record["largest_link_error"]
    lines = [
        f"testbed: {record['hosts']} hosts, links within {units.percent(worst)} of what was declared; {noise_text(record['blocks'][-1])}"
    ]
    if record["void_runs"]:
        ending = "" if record["counts"] else ", the last one among them: its times do not count"
        lines.append(f"void: {record['void_runs']} of {len(record['blocks'])} measurements{ending}")
    return lines


def ceiling_table(ceiling: Ceiling) -> Table:
    """Every rate that was tried."""
    title = f"{ceiling.hosts} hosts on {ceiling.machine['usable_cores']} cores: what this machine carries"
    table = new_table(title, "rate", "alpha", "largest error", "void", "carries", left=("carries",))
    for point in ceiling.points:
        worst = max(point.residuals.values(), key=abs) if point.residuals else None
        quiet = "" if point.counts else " (the machine was busy)"
        verdict = "yes" if point.carries else f"no: {point.why}"
        table.add_row(
            format_bandwidth(point.rate_bps),
            units.seconds(point.alpha_s),
            units.percent(worst, sign=True),
            str(point.num_void),
            verdict + quiet,
        )
    return table


def ceiling_lines(ceiling: Ceiling) -> list[str]:
    """The verdict, and how far it can be trusted."""
    lines = [f"ceiling: {format_bandwidth(ceiling.rate_bps)}" if ceiling.rate_bps else "ceiling: none of these rates is carried"]
    if any(not point.counts for point in ceiling.points):
        lines.append("warning: the machine was busy at times: calibrate again when it is quiet")
    return lines


def _megabits(bps: float) -> str:
    return f"{bps * 1e-6:.2f} Mbit/s"
