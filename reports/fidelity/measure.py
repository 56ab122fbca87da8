"""Fidelity: calibrate two strategies, predict all, seal the predictions, then run everything on the testbed.

From the repository's root, on a quiet machine: ``python reports/fidelity/measure.py`` (about 25 minutes), then with
``--regimes`` (about 8 more) and ``--second`` (12). ``--stage`` does one part only, ``--resume`` goes on where it was interrupted,
``--tables`` prints the tables of what is there and draws its figure, ``--quick`` tries the whole chain in two minutes, in a
folder of its own, for figures that mean nothing. ``--engine`` says who predicts; ``--check-engines`` predicts every cell with
both engines, says whether they agree, and measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import time
from pathlib import Path

from calibrate import calibrate
from engines import check_engines
from files import Files, append, digest_of, now, read, seal, sealed
from grid import CLASSES, QUICK, RUNS, Effort, Environment, environments, regimes
from legs import run_environment
from predict import predict
from summary import show

from fleetbench.store import machine, versions
from sim.run import Engine

HERE = Path(__file__).parent
STAGES = ("calibrate", "predict", "measure")
QUICK_STRATEGIES = 3


def main() -> None:
    """Read the options and do what they say."""
    options = _options()
    found, prefix = _grid(options)
    folder, effort = HERE, Effort()
    found = tuple(environment for environment in found if (options.only or "") in environment.name)
    if options.quick:
        folder, effort = RUNS / "fidelity-quick", QUICK
        found = tuple(_short(environment) for environment in found if options.only or environment is found[-1])
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    files = Files(folder=folder, prefix=prefix)
    if options.tables:
        show(files)
        return
    if options.check_engines:
        check_engines(files, found, effort.leg_s)
        return
    stages = [options.stage] if options.stage else list(STAGES)
    if not options.stage and not options.resume and files.raw.exists():
        raise SystemExit(f"{files.raw} is there already: go on with --resume, or move it away")
    for stage in stages:
        begin = time.monotonic()
        if stage == "calibrate":
            calibrate(files, found, effort)
        elif stage == "predict":
            _predict(files, found, effort.leg_s, options.engine, resume=options.resume)
        else:
            _measure(files, found, effort)
        print(f"{stage}: {time.monotonic() - begin:.0f} s", flush=True)
    if "measure" in stages:
        show(files)


def _predict(files: Files, found: tuple[Environment, ...], leg_s: float, engine: Engine, *, resume: bool) -> None:
    if resume and files.seal.exists():
        print(f"predicted already: sha256 {sealed(files)[0]}", flush=True)
        return
    print(f"predicted and sealed: sha256 {seal(files, predict(files, found, leg_s, engine))}", flush=True)


def _measure(files: Files, found: tuple[Environment, ...], effort: Effort) -> None:
    digest, predictions = sealed(files)
    if digest_of(files.calibrations) != predictions["calibrations"]:
        print(f"{files.calibrations} has grown since the predictions, which do not change", flush=True)
    append(files.raw, {"kind": "start", "at": now(), "predictions": digest, "machine": machine(), "versions": versions()})
    print(f"predictions: sha256 {digest}, of {predictions['created']} UTC", flush=True)
    for environment in found:
        known = predictions["environments"].get(environment.name)
        if known is None:
            raise SystemExit(f"{environment.name} is not predicted, so it is not measured")
        run_environment(files, environment, known["cells"], digest, effort)
    legs = [entry for entry in read(files.raw) if entry["kind"] == "leg"]
    print(f"{len(legs)} legs, {sum(not entry['counts'] for entry in legs)} of them void", flush=True)


def _grid(options: argparse.Namespace) -> tuple[tuple[Environment, ...], str]:
    """What is measured, and how its files' names begin."""
    if options.regimes:
        return regimes(), "regimes_"
    if options.second:
        first, whole = environments(), environments(len(CLASSES))
        return whole[len(first) :], "second_"
    return environments(), ""


def _short(environment: Environment) -> Environment:
    """A few strategies of it, the last ones among them."""
    names = list(environment.strategies)
    kept = [*names[: QUICK_STRATEGIES - 1], *names[QUICK_STRATEGIES - 1 :][-2:]]
    return dataclasses.replace(environment, strategies={name: environment.strategies[name] for name in kept})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=STAGES, help="one stage only; it leaves what is done already")
    parser.add_argument("--resume", action="store_true", help="go on where it was interrupted")
    parser.add_argument("--regimes", action="store_true", help="the regimes where the model may break, instead of the grid")
    parser.add_argument("--second", action="store_true", help="the class of the Latin square that was left, for a model that was mended")
    parser.add_argument("--only", metavar="TEXT", help="environments with this in their name only")
    parser.add_argument("--engine", choices=("auto", "reference", "vector"), default="auto", help="which engine predicts")
    parser.add_argument("--check-engines", action="store_true", help="predict all cells with both engines, compare, and measure nothing")
    parser.add_argument("--tables", action="store_true", help="print the tables of what is there, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="try the chain, for figures that mean nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
