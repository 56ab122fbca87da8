"""``fleetbench profile --from RUN_OR_TRACE``: stragglers of what ran already, as ``[[cluster.stragglers]]``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from fleetbench.cli.output import emit
from fleetbench.errors import ConfigError

if TYPE_CHECKING:
    from fleetbench.measurements import StragglerFit


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare ``--from`` and ``--stage``."""
    source = (
        "measure nothing: fit stragglers to this run's folder, to its steps.parquet, or to a trace, and print [[cluster.stragglers]]; "
        "docs/stragglers.md has the formats"
    )
    parser.add_argument("--from", type=Path, metavar="RUN_OR_TRACE", dest="source", help=source)
    parser.add_argument("--stage", type=int, metavar="N", help="with --from: the pipeline stage of a trace of operations")


def refuse_stage(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for a stage of nothing."""
    if arguments.stage is not None:
        raise ConfigError("chooses a stage of a trace", "--stage", repr(arguments.stage), "name the trace with --from")


def run(arguments: argparse.Namespace) -> int:
    """Fit, and print what an experiment file takes."""
    for given, name in (
        (arguments.experiment, "EXPERIMENT.toml"),
        (arguments.overrides, "--set"),
        (arguments.model, "--model"),
        (arguments.collectives, "--collectives"),
        (arguments.command_line, "--"),
    ):
        if given:
            raise ConfigError("nothing runs and nothing is measured where stragglers are fitted", name, hint=f"drop {name}, or --from")
    from fleetbench.config import encode
    from fleetbench.fitting.sources import fit_source

    fit = fit_source(arguments.source, stage=arguments.stage, seed=arguments.seed or 0)
    emit(json.dumps(encode(fit), indent=1) if arguments.json else as_toml(fit, arguments.source))
    return 0


def as_toml(fit: StragglerFit, source: Path) -> str:
    """The entries as TOML, behind comments that say what was found."""
    from fleetbench.config import encode
    from fleetbench.report import units

    lines = [f"# fitted to {source}", *(f"# {statement}" for statement in fit.statements)]
    lines.append(f"# compute at X = 0: {units.seconds(fit.base * 1e-9)} a step (median of all ranks: {units.seconds(fit.median * 1e-9)})")
    if not fit.entries:
        lines.append("# no entry: nothing makes trainers late")
    for entry in encode(fit).get("entries", ()):
        lines += ["", "[[cluster.stragglers]]", *(f"{name} = {json.dumps(value)}" for name, value in entry.items())]  # TOML, on a line
    return "\n".join(lines)
