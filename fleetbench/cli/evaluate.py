"""``fleetbench evaluate``: the last layer's vectors over a data set, compared with a service's."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fleetbench import units
from fleetbench.cli import progress
from fleetbench.cli.options import Commands, add_command, add_experiment, add_json, load_experiment, number, whole
from fleetbench.cli.output import emit, emit_table, new_table, say
from fleetbench.digests import write_whole
from fleetbench.errors import ConfigError, GateFailed

TOLERANCE = 1e-4
"""Tolerance between two errors: float32 sums in another order stay below it, half precision does not."""


def register(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(commands, "evaluate", "write a model's output over a data set; compare those of an online service", run)
    add_experiment(parser)
    weights = "the model's weights: .safetensors, .pt of a state_dict, or the folder of fleet.save_persistables"
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help=weights)
    parser.add_argument("--samples", type=whole(1), metavar="N", help="the first N samples only; default: all")
    stored = "evaluate nothing, but compare these: an evaluation's folder, or a file of vectors"
    parser.add_argument("--vectors", type=Path, metavar="OFFLINE", help=stored)
    service = "compare with what a service returned for the same samples, in Parquet; exit with 1 beyond the tolerance"
    parser.add_argument("--against", type=Path, metavar="ONLINE", help=service)
    gate = f"largest difference that passes, as a share of the offline vector's largest magnitude; default: {TOLERANCE:g}"
    parser.add_argument("--tolerance", type=number("a share of at least 0", 0), default=TOLERANCE, metavar="X", help=gate)
    add_json(parser, "the evaluation's summary.json, or the comparison's figures under `comparison`,")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, compare, or both.

    Raises ``GateFailed``, after the table, for differences beyond the tolerance.
    """
    _refuse_contradictions(arguments)
    from fleetbench.vectors import compare_vectors, read_vectors

    online = None if arguments.against is None else read_vectors(arguments.against)  # read first: the evaluation may take hours
    folder: Path | None = None
    summary: dict[str, Any] = {}
    if arguments.vectors is None:
        folder, summary = _evaluated(arguments)
    comparison = None
    if online is not None:
        comparison = compare_vectors(read_vectors(folder or arguments.vectors), online, arguments.tolerance)
        if folder is not None:
            write_whole(folder / "comparison.json", json.dumps(comparison, indent=1))
        summary |= {"comparison": comparison}
    if arguments.json:
        emit(json.dumps(summary, indent=1))
    else:
        if folder is not None:
            _print_evaluation(summary)
        if comparison is not None:
            _print_comparison(comparison)
    if folder is not None:
        (say if arguments.json else emit)(f"vectors: {folder}")
    if comparison is not None and not comparison["passed"]:
        what = f"{comparison['num_past']} of {comparison['samples']} samples differ by more than {comparison['tolerance']:g}"
        hint = (
            "shares up to 1e-5 are the order of float32 sums, and up to 1e-2 half precision; "
            "more is usually another checkpoint, preprocessing or layer in the service"
        )
        raise GateFailed(what, "evaluate --against", f"worst: {comparison['worst'][0]['id']!r}", hint)
    return 0


def _evaluated(arguments: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    experiment = load_experiment(arguments)
    from fleetbench.result import SCHEMA
    from fleetbench.store import new_folder
    from fleetbench.vectors import FILE
    from real.evaluation import evaluate

    with progress.steps("evaluate") as advance, new_folder(experiment, "evaluate", arguments.out) as (folder, manifest):
        found = evaluate(
            experiment,
            folder / FILE,
            checkpoint=arguments.checkpoint,
            samples=arguments.samples,
            progress=advance,
        )
        summary = {
            "schema": SCHEMA,
            "executor": "evaluate",
            "name": experiment.name,
            "experiment": experiment.digest(),
            "run_id": manifest["run_id"],
            "device": experiment.run.device,
            "seed": experiment.run.seed,
            "batch_size": experiment.workload.batch_size,
            "dtype": "float32",
            **found,
            "samples_per_s": found["samples"] / found["wall_s"],
        }
        experiment.save(folder / "experiment.toml")
        write_whole(folder / "summary.json", json.dumps(summary, indent=1))
        checkpoint = {"path": found["checkpoint"], "sha256": found["checkpoint_sha256"]}
        manifest |= {"kind": "evaluation", "checkpoint": checkpoint, "host_s": found["wall_s"]}
    return folder, summary


def _print_evaluation(summary: dict[str, Any]) -> None:
    emit(f"{summary['name']}: {summary['model']} on {summary['data']}, device {summary['device']}")
    emit(f"  weights: {summary['checkpoint']}")
    rate = f"{summary['samples_per_s']:,.0f} samples per second"
    emit(f"  {summary['samples']:,} vectors of {summary['length']:,} numbers, batches of {summary['batch_size']}, {rate}")
    if summary["num_not_finite"]:
        emit(f"  WARNING: {summary['num_not_finite']:,} vectors hold NaN or infinity")


def _print_comparison(found: dict[str, Any]) -> None:
    """Print the figures over all samples, the worst samples, and whether they pass."""

    def short(value: float | None, form: str = ".2e") -> str:
        return units.NONE if value is None else f"{value:{form}}"

    emit(f"offline: {found['offline']}\nonline:  {found['online']}")
    emit(f"cosine: lowest {short(found['lowest_cosine'], '.9f')}, mean {short(found['mean_cosine'], '.9f')}")
    for name, spread in (("largest difference", found["difference"]), ("as a share of the largest magnitude", found["relative"])):
        emit(f"{name}: worst {short(spread['max'])}, p95 {short(spread['p95'])}, mean {short(spread['mean'])}")
    differing = [item for item in found["worst"] if item["difference"] != 0]
    if differing:
        table = new_table("the worst samples", "sample", "cosine", "difference", "share", "at number", "offline", "online")
        for item in differing:
            cells = [short(item["cosine"], ".9f"), short(item["difference"]), short(item["relative"]), str(item["component"])]
            table.add_row(item["id"], *cells, *(short(item[side], ".7g") for side in ("offline", "online")))
        emit_table(table)
    not_finite = f", {found['num_not_finite']:,} with NaN or infinity" if found["num_not_finite"] else ""
    verdict = "all within" if found["passed"] else f"{found['num_past']:,} past"
    emit(f"{found['samples']:,} samples ({found['num_equal']:,} equal{not_finite}): {verdict} the tolerance of {found['tolerance']:g}")


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    if arguments.against is None and arguments.vectors is not None:
        hint = "--against ONLINE names what a service returned"
        raise ConfigError("there is nothing to compare with", "--vectors", str(arguments.vectors), hint)
    if arguments.vectors is not None and (arguments.experiment or arguments.overrides or arguments.checkpoint or arguments.samples):
        hint = "drop the experiment, --set, --checkpoint and --samples, or --vectors"
        raise ConfigError("nothing is evaluated where vectors are given", "--vectors", str(arguments.vectors), hint)
