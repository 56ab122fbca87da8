"""``fleetbench evaluate``: the last layer's vectors over a data set, and whether a service returns the same."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetbench.cli import progress
from fleetbench.cli.execution import load_experiment
from fleetbench.cli.options import add_command, add_experiment, add_json
from fleetbench.cli.output import emit, say
from fleetbench.errors import ConfigError, GateFailed

if TYPE_CHECKING:
    from fleetbench.cli.options import Commands
    from fleetbench.report.vector_comparison import VectorComparison
    from fleetbench.vectors import Vectors

TOLERANCE = 1e-4
"""Sums of float32 in another order stay below it, computing in half precision does not."""


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "evaluate", "write the last layer's vectors over a data set; compare those of an online service", run)
    add_experiment(parser)
    weights = "the model's weights: .safetensors, .pt of a state_dict, or the folder of fleet.save_persistables"
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help=weights)
    model = "evaluate a model outside the registry: what this factory returns, a model or (model, inputs of the whole data set, loss)"
    parser.add_argument("--model", metavar="PACKAGE.MODULE:FACTORY", help=model)
    parser.add_argument("--layer", metavar="NAME", help="the submodule whose output is taken; default: the model's own output")
    parser.add_argument("--samples", type=_count, metavar="N", help="the first N samples only; default: all")
    stored = "evaluate nothing, but compare these: an evaluation's folder, or a file of vectors"
    parser.add_argument("--vectors", type=Path, metavar="OFFLINE", help=stored)
    service = "compare with what a service returned for the same samples: .parquet, .jsonl or .csv; exit 1 past the tolerance"
    parser.add_argument("--against", type=Path, metavar="ONLINE", help=service)
    gate = f"largest difference that passes, as a share of the offline vector's largest magnitude; default: {TOLERANCE:g}"
    parser.add_argument("--tolerance", type=_tolerance, metavar="X", help=gate)
    add_json(parser, "the evaluation's summary.json, or the comparison's figures under `comparison`,")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, compare, or both. Raises ``GateFailed``, behind the table, for vectors that differ by more than the tolerance."""
    _refuse_contradictions(arguments)
    online = None
    if arguments.against is not None:
        from fleetbench.vector_files import read_vectors

        online = read_vectors(arguments.against)  # hours before it is needed
    folder: Path | None = None
    summary: dict[str, Any] = {}
    if arguments.vectors is None:
        folder, summary = _evaluated(arguments)
    comparison = None if online is None else _compared(folder or arguments.vectors, online, arguments.tolerance)
    if comparison is not None:
        if folder is not None:
            from fleetbench.report.evaluation_folder import store_comparison

            store_comparison(folder, comparison)
        summary = summary | {"comparison": comparison.to_dict()}
    _print(folder, summary, comparison, as_json=arguments.json)
    if comparison is not None and not comparison.passed:
        what = f"{comparison.num_past} of {comparison.samples} samples differ by more than {comparison.tolerance:g}"
        hint = "is it the same checkpoint, layer, preprocessing and precision behind the service? docs/evaluate.md says how to tell"
        raise GateFailed(what, "evaluate --against", f"worst: {comparison.worst[0].id!r}", hint)
    return 0


def _evaluated(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    experiment = load_experiment(arguments)
    from fleetbench.report.evaluation_folder import save_evaluation
    from real.evaluation.evaluation import Wanted, evaluate
    from real.external import named

    wanted = Wanted(checkpoint=arguments.checkpoint, model=arguments.model, layer=arguments.layer, samples=arguments.samples)
    of_model = experiment if arguments.model is None else named(experiment, arguments.model)
    with progress.steps("evaluate") as advance:
        return save_evaluation(of_model, arguments.out, lambda path: evaluate(experiment, wanted, path, progress=advance))


def _compared(offline: Path, online: Vectors, tolerance: float | None) -> VectorComparison:
    from fleetbench.report.vector_comparison import compare_vectors
    from fleetbench.vector_files import read_vectors

    return compare_vectors(read_vectors(offline), online, TOLERANCE if tolerance is None else tolerance)


def _print(folder: Path | None, summary: dict[str, Any], comparison: VectorComparison | None, *, as_json: bool) -> None:
    if as_json:
        emit(json.dumps(summary, indent=1))
    else:
        from fleetbench.cli import evaluate_tables

        if folder is not None:
            evaluate_tables.print_evaluation(summary)
        if comparison is not None:
            evaluate_tables.print_comparison(comparison)
    if folder is not None:
        (say if as_json else emit)(f"vectors: {folder}")


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    if arguments.against is None:
        for option, value in (("--tolerance", arguments.tolerance), ("--vectors", arguments.vectors)):
            if value is not None:
                raise ConfigError("there is nothing to compare with", option, str(value), "--against ONLINE names what a service returned")
    if arguments.vectors is not None:
        given = {
            "EXPERIMENT.toml": arguments.experiment,
            "--set": arguments.overrides or None,
            "--checkpoint": arguments.checkpoint,
            "--model": arguments.model,
            "--layer": arguments.layer,
            "--samples": arguments.samples,
        }
        for option, value in given.items():
            if value is not None:
                raise ConfigError("nothing is evaluated where vectors are given", option, str(value), "drop it, or --vectors")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"not a whole number of at least 1: {text}")
    return int(text)


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"not a share of at least 0: {text!r}")
    return value
