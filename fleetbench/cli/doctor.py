"""``fleetbench doctor``: what this machine offers, and what will get in the way."""

from __future__ import annotations

import argparse
import dataclasses
import json

from fleetbench.cli.options import Commands, add_command, add_json
from fleetbench.cli.output import emit, emit_table, new_table


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "doctor", "look at this machine: versions, cores, devices, network", run)
    add_json(parser, "the findings")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; a warning is no failure."""
    from fleetbench.cli.examination import examine

    findings = examine()
    if arguments.json:
        emit(json.dumps(dataclasses.asdict(findings), indent=1))
        return 0
    table = new_table("fleetbench doctor", "", "found", left=("found",), show_header=False)
    for section, facts in findings.sections.items():
        table.add_section()
        for name, value in facts.items():
            table.add_row(f"{section}: {name}", value)
    emit_table(table)
    for text in findings.skipped:
        emit(f"SKIPPED: {text}")
    for text in findings.warnings:
        emit(f"warning: {text}")
    if not findings.warnings:
        emit("no warnings")
    return 0
