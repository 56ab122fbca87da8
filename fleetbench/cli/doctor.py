"""``fleetbench doctor``: what this machine offers, or every rank's, and what will get in the way."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from fleetbench.cli.options import add_command, add_json
from fleetbench.cli.output import emit, emit_table

if TYPE_CHECKING:
    from fleetbench.cli.options import Commands


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "doctor", "look at this machine: versions, cores, devices, network, limits", run)
    add_json(parser, "the findings")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; a warning is no failure. Of several ranks, rank 0 prints."""
    import json

    from fleetbench.cli import examination, rank_findings

    findings = examination.examine()
    if not rank_findings.look_at_ranks(findings):
        return 0
    if arguments.json:
        emit(json.dumps(findings.to_dict(), indent=1))
        return 0
    from rich.table import Table

    table = Table(title="fleetbench doctor", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column()
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
