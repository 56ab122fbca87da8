"""``fleetbench compare``: two runs side by side, the error of a simulation step by step, and a gate on the step times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.cli.options import add_command, add_json
from fleetbench.cli.output import emit, emit_table, say
from fleetbench.errors import GateFailed

if TYPE_CHECKING:
    from fleetbench.cli.options import Commands
    from fleetbench.result import RunResult


def register(commands: Commands) -> None:
    """Declare the command."""
    summary = "lay two runs side by side; a simulated and a real one step by step"
    parser = add_command(commands, "compare", summary, run)
    parser.add_argument("a", type=Path, metavar="A", help="a run folder")
    parser.add_argument("b", type=Path, metavar="B", help="another; ratios are B / A")
    repeats = "further real runs of the same experiment: what they differ by is the noise beside the simulation's error"
    parser.add_argument("repeats", type=Path, nargs="*", metavar="REPEAT", help=repeats)
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write both timelines into one file for Perfetto (.json.gz)")
    gate = "exit 1 when the mean step times differ by more, in per cent of A's"
    parser.add_argument("--fail-over", type=_percent, metavar="PERCENT", help=gate)
    add_json(parser, "the comparison")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison. Raises ``GateFailed`` behind it where the step times differ by more than asked."""
    from fleetbench.report.compare import compare_runs
    from fleetbench.report.compare_fidelity import compare_fidelity
    from fleetbench.report.runs import read_run

    a, b, *repeats = (read_run(folder) for folder in (arguments.a, arguments.b, *arguments.repeats))
    comparison = compare_runs(a, b)
    fidelity = compare_fidelity(a, b, repeats)
    if arguments.timeline is not None:
        from fleetbench.report.merged_timeline import write_merged_timeline

        write_merged_timeline(arguments.timeline, _labels(a, b))
    if arguments.json:
        emit(json.dumps(comparison.to_dict() | ({} if fidelity is None else {"fidelity": fidelity.to_dict()}), indent=1))
    else:
        from fleetbench.cli import compare_tables, tables

        emit_table(tables.comparison_table(comparison))
        emit(f"plans: {'equal' if comparison.same_plan else 'different'}")
        emit(f"mean step time: {100 * comparison.step_difference:+.2f} %")
        if comparison.staleness_variation is not None:
            emit(f"staleness: a total variation of {comparison.staleness_variation:.3f} between the histograms")
        if fidelity is not None:
            compare_tables.print_fidelity(fidelity)
    if arguments.timeline is not None:
        (say if arguments.json else emit)(f"timeline: {arguments.timeline}")
    gate = arguments.fail_over
    if gate is not None and abs(comparison.step_difference) * 100 > gate:
        raise GateFailed(
            f"mean step times differ by more than {gate:g} %", "compare --fail-over", f"{100 * comparison.step_difference:+.2f} %"
        )
    return 0


def _labels(a: RunResult, b: RunResult) -> dict[str, RunResult]:
    """The runs by the names of their executors, or by A and B where these are equal."""
    names = [a.summary.executor, b.summary.executor]
    return dict(zip(names if names[0] != names[1] else [f"A ({names[0]})", f"B ({names[1]})"], (a, b), strict=True))


def _percent(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"not a percentage: {text!r}")
    return value
