"""``fleetbench compare``: two runs, the error of a simulation step by step, and a gate on the step times."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench import units
from fleetbench.cli.options import Commands, add_command, add_json, number
from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.errors import ConfigError, GateFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetbench.report.fidelity import Figures
    from fleetbench.result import RunResult


_NAMES = {
    "step": "step",
    "compute": "  compute",
    "wait": "  wait",
    "exposed_comm": "  exposed comm",
    "not_compute": "  their sum",
    "update": "  update",
    "other": "  other",
}


def register(commands: Commands) -> None:
    """Add the command's parser."""
    parser = add_command(commands, "compare", "compare two runs; a simulated and a real one step by step", run)
    parser.add_argument("a", type=Path, metavar="A", help="a run folder")
    parser.add_argument("b", type=Path, metavar="B", help="another; ratios are B / A")
    parser.add_argument("others", type=Path, nargs="*", metavar="OTHER", help="with --losses: further runs to draw")
    parser.add_argument("--losses", type=Path, metavar="PNG", help="draw all losses, also of OTHER, against steps and seconds")
    gate = "exit with 1 if the mean step times differ by more than this, in per cent of A's"
    parser.add_argument("--fail-over", type=number("a percentage", 0), metavar="PERCENT", help=gate)
    add_json(parser, "the comparison")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison. Raises ``GateFailed`` if the step times differ by more than allowed."""
    from fleetbench.report.compare import compare_runs
    from fleetbench.report.fidelity import compare_fidelity
    from fleetbench.report.model import read_run

    if arguments.others and arguments.losses is None:
        raise ConfigError(
            "further runs are drawn by --losses", "OTHER", str(arguments.others[0]), "name two runs, or add --losses losses.png"
        )
    a, b, *others = (read_run(folder) for folder in (arguments.a, arguments.b, *arguments.others))
    comparison, fidelity = compare_runs(a, b), compare_fidelity(a, b)
    if arguments.losses is not None:
        _draw_losses([a, b, *others], arguments.losses)
    if arguments.json:
        emit(json.dumps(comparison.to_dict() | ({} if fidelity is None else {"fidelity": fidelity}), indent=1))
    else:
        emit(comparison.text())
        emit(f"mean step time, B over A: {100 * comparison.step_difference:+.2f} %")
        if fidelity is not None:
            _print_fidelity(fidelity)
    gate = arguments.fail_over
    if gate is not None and abs(comparison.step_difference) * 100 > gate:
        raise GateFailed(
            f"mean step times differ by more than {gate:g} %", "compare --fail-over", f"{100 * comparison.step_difference:+.2f} %"
        )
    return 0


def _draw_losses(runs: Sequence[RunResult], path: Path) -> None:
    """Draw the losses of the runs as a PNG, each named by its executor and folder."""
    from fleetbench.report import figures

    if path.suffix != ".png":
        raise ConfigError("the picture is a PNG", "--losses", str(path), f"for example {path.with_suffix('.png')}")
    targets = {run.experiment.workload.target_loss for run in runs}
    named = {f"{run.summary.executor}, {run.path}": run for run in runs}
    picture = figures.loss_against_time(named, targets.pop() if len(targets) == 1 else None)
    try:
        figures.save_png(picture, path)
        say(f"picture: {path}")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", "--losses", str(path), "a file in an existing folder") from None


def _print_fidelity(fidelity: Figures) -> None:
    """Print the differences of a simulated and a real run, the simulation's errors, and notes."""
    from fleetbench.report.fidelity import difference_text

    emit("")
    if not fidelity["comparable"]:
        emit("NOT COMPARED step by step: simulated and real are of other experiments, ranks or steps (sim against real)")
    elif fidelity["differences"]:
        emit("compared step by step, although these differ (sim against real)")
    for difference in fidelity["differences"]:
        emit(f"  {'!' if difference['other_steps'] else '-'} {difference_text(difference)}")
    if fidelity["comparable"]:
        _print_errors(fidelity["errors"])
    for note in fidelity["notes"]:
        emit(f"note: {note}")


def _print_errors(errors: Figures) -> None:
    """Print the error of the step and of its parts over all ranks and steps."""
    table = new_table("error of the simulation (sim - real), ms", "", "sim", "real", "bias", "of step", "mean abs", "p95", "max")
    for name, label in _NAMES.items():
        phase = errors["step"] if name == "step" else errors["phases"][name]
        error = phase["error_s"]
        table.add_row(
            label,
            units.milliseconds(phase["predicted_s"]),
            units.milliseconds(phase["true_s"]),
            units.milliseconds(error["bias"], sign=True),
            units.percent(error["bias"] / errors["step"]["true_s"], sign=True),
            *(units.milliseconds(error[figure]) for figure in ("mean_absolute", "p95", "max")),
        )
    emit_table(table)
    relative, wall_s = errors["step"]["relative"], errors["wall_s"]
    mean, p95, most = (units.percent(relative[name]) for name in ("mean_absolute", "p95", "max"))
    bias = units.percent(relative["bias"], sign=True)
    emit(f"error of single steps, each as a share of its own real time: bias {bias}, mean abs {mean}, p95 {p95}, max {most}")
    emit(f"run time: {units.seconds(wall_s['predicted'])} simulated, {units.seconds(wall_s['true'])} real")
