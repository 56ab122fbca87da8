"""``fleetbench testbed``: the experiment's cluster in one box: is it as declared?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from fleetbench.cli import progress
from fleetbench.cli.execution import load_experiment
from fleetbench.cli.options import add_command, add_experiment, add_json
from fleetbench.cli.output import emit, emit_table, new_table
from fleetbench.quantities import format_bandwidth
from fleetbench.report import units

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table

    from fleetbench.cli.options import Commands


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "testbed", "build an experiment's cluster on this machine, and measure its links", run)
    add_experiment(parser)
    add_json(parser, "the findings")
    parser.set_defaults(interrupted="the testbed was taken down")


def run(arguments: argparse.Namespace) -> int:
    """Survey the testbed."""
    experiment = load_experiment(arguments)
    from real.testbed_survey import survey

    with progress.steps("testbed") as advance:
        found = survey(experiment.cluster, advance)
    if arguments.json:
        emit(json.dumps(found, indent=1))
        return 0
    emit_table(links_table(found))
    emit_table(all_reduce_table(found))
    for line in noise_lines(found):
        emit(line)
    return 0


def links_table(survey: Mapping[str, Any]) -> Table:
    """Every link each way, as declared and as measured."""
    title = f"{survey['hosts']} hosts: plain TCP over each link, all at once"
    columns = ("link", "direction", "declared", "expected payload", "measured payload", "error")
    table = new_table(title, *columns, left=("direction",))
    for rate in survey["links"]:
        payload = (f"{rate[name] * 1e-6:.2f} Mbit/s" for name in ("expected_payload_bps", "measured_payload_bps"))
        declared = format_bandwidth(rate["declared_bps"])
        table.add_row(rate["link"], rate["direction"], declared, *payload, units.percent(rate["error"], sign=True))
    return table


def all_reduce_table(survey: Mapping[str, Any]) -> Table:
    """Gloo's all-reduces against the closed form."""
    alpha = units.seconds(survey["alpha_s"])
    table = new_table(f"all-reduce (gloo), closed form with alpha {alpha}", "size", "measured ms", "closed form ms", "error")
    for entry in survey["all_reduces"]:
        times = (units.milliseconds(entry[name]) for name in ("measured_s", "closed_form_s"))
        table.add_row(units.size(entry["nbytes"]), *times, units.percent(entry["error"], sign=True))
    return table


def noise_lines(survey: Mapping[str, Any]) -> list[str]:
    """What the machine did in the meantime, what counts, and what is not there."""
    blocks = survey["blocks"]
    lines = [
        f"noise: {noise_text(blocks[-1])}",
        f"linear model: {'holds' if survey['holds'] else 'does not hold'} (3 % up to 1 MB, 5 % above)",
    ]
    if survey["void_runs"]:
        lines.append(f"void: {survey['void_runs']} of {len(blocks)} measurements")
    if not survey["counts"]:
        lines.append("warning: the machine was not quiet, and the times do not count")
    lines += [f"refused by the kernel: {entry['what']}: {entry['why']}" for entry in survey["refused"]]
    lines += [f"SKIPPED {entry['what']}: {entry['why']}" for entry in survey["skipped"]]
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
