"""``fleetbench report``: writes a run or a tuning as a self-contained page."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from fleetbench.cli.options import Commands, add_command, add_json
from fleetbench.cli.output import emit


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "report", "write report.html for a run or a tuning", run)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a run folder, or the folder of a tuning")
    add_json(parser, "the report's path")


def run(arguments: argparse.Namespace) -> int:
    """Write ``report.html`` into the folder and print its path."""
    from fleetbench.report.html import write_report

    path = write_report(arguments.folder)
    emit(json.dumps({"report": str(path)}) if arguments.json else f"report: {path}")
    return 0
