"""``fleetbench compare``: two runs side by side, and a gate on their step times."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.cli.options import add_command, add_json
from fleetbench.cli.output import emit, emit_table
from fleetbench.errors import GateFailed

if TYPE_CHECKING:
    from fleetbench.cli.options import Commands


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "compare", "lay two runs side by side", run)
    parser.add_argument("a", type=Path, metavar="A", help="a run folder")
    parser.add_argument("b", type=Path, metavar="B", help="another; ratios are B / A")
    gate = "exit 1 when the mean step times differ by more, in per cent of A's"
    parser.add_argument("--fail-over", type=_percent, metavar="PERCENT", help=gate)
    add_json(parser, "the comparison")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison. Raises ``GateFailed`` behind it where the step times differ by more than asked."""
    from fleetbench.report.compare import compare_runs
    from fleetbench.report.runs import read_run

    comparison = compare_runs(read_run(arguments.a), read_run(arguments.b))
    if arguments.json:
        emit(comparison.to_json())
    else:
        from fleetbench.cli import tables

        emit_table(tables.comparison_table(comparison))
        emit(f"plans: {'equal' if comparison.same_plan else 'different'}")
        emit(f"mean step time: {100 * comparison.step_difference:+.2f} %")
    gate = arguments.fail_over
    if gate is not None and abs(comparison.step_difference) * 100 > gate:
        raise GateFailed(
            f"mean step times differ by more than {gate:g} %", "compare --fail-over", f"{100 * comparison.step_difference:+.2f} %"
        )
    return 0


def _percent(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"not a percentage: {text!r}")
    return value
