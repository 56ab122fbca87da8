"""``fleetbench testbed``: builds the experiment's cluster on one machine, and measures its links."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from fleetbench import units
from fleetbench.cli.options import Commands, add_command, add_experiment, add_json, load_experiment
from fleetbench.cli.output import emit, emit_table, new_table
from fleetbench.errors import ConfigError
from fleetbench.quantities import format_bandwidth

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.table import Table


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "testbed", "build an experiment's cluster on this machine, and measure its links", run)
    add_experiment(parser)
    add_json(parser, "the findings")
    parser.set_defaults(interrupted="the testbed was taken down")


def run(arguments: argparse.Namespace) -> int:
    """Build the testbed, measure every link between two machine checks, and take it down."""
    cluster = load_experiment(arguments).cluster
    if cluster.nodes < 2:
        raise ConfigError("one host has no link to look at", "cluster.nodes", str(cluster.nodes), "set cluster.nodes = 2 or more")
    from real.testbed.testbed import Testbed

    with Testbed(cluster) as testbed:
        testbed.run(testbed.verify)
        found = testbed.record() | {"skipped": testbed.skipped()}
    if arguments.json:
        emit(json.dumps(found, indent=1))
        return 0
    emit_table(links_table(found))
    for trip in found["round_trips"]:
        emit(
            f"{trip['source']} to {trip['target']} and back: {1e3 * trip['measured_s']:.4g} ms, declared {1e3 * trip['declared_s']:.4g} ms"
        )
    for line in run_lines(found):
        emit(line)
    for entry in found["refused"]:
        emit(f"refused by the kernel: {entry['what']}: {entry['why']}")
    for entry in found["skipped"]:
        emit(f"SKIPPED {entry['what']}: {entry['why']}")
    return 0


def links_table(found: Mapping[str, Any]) -> Table:
    """Return a table with the declared and the measured rate of every link in each direction."""
    title = f"{found['hosts']} hosts: plain TCP over each link, all at once"
    columns = ("link", "direction", "declared", "expected payload", "measured payload", "error")
    table = new_table(title, *columns, left=("direction",))
    for rate in found["links"]:
        payload = (f"{rate[name] * 1e-6:.2f} Mbit/s" for name in ("expected_payload_bps", "measured_payload_bps"))
        declared = format_bandwidth(rate["declared_bps"])
        table.add_row(rate["link"], rate["direction"], declared, *payload, units.percent(rate["error"], sign=True))
    return table


def run_lines(record: Mapping[str, Any]) -> list[str]:
    """Summarise a run's ``testbed.json`` in a line or two."""
    noise = record["blocks"][-1]["noise"]
    head = (
        f"testbed: {record['hosts']} hosts, links within {units.percent(record['largest_link_error'])} of what was declared; "
        f"foreign user time {units.percent(noise['foreign_cores'])} of a core, "
        f"TCP retransmits {noise['retransmits']}, timeouts {noise['timeouts']}, reorderings {noise['reorders']}, "
        f"sentinel moved {units.percent(record['sentinel_moved'], sign=True)}"
    )
    lines = [head]
    if record["void_runs"]:
        ending = "" if record["counts"] else ", the last one among them: its times do not count"
        lines.append(f"void: {record['void_runs']} of {len(record['blocks'])} measurements{ending}")
    return lines
