"""Fragments and overlap on the testbed: predicted and sealed first, then measured.

From the repository's root, on a quiet machine:

    python reports/diloco/testbed.py predict     # calibrates both links, predicts every cell, writes the seal: about 2 minutes
    git add reports/diloco && git commit -m "..."  # the predictions, before the first leg
    python reports/diloco/testbed.py measure     # refuses predictions that are not committed; about 9 minutes
    python reports/diloco/testbed.py tables

4 hosts, emulated compute (trainers sleep, bytes are real), 50 and 100 Mbit/s, K = 8 and 32, P = 1, 2, 4, tau = 0, 1, 2 below K / P. Legs,
calibration and seal are those of ``reports/fidelity``. ``--quick`` tries the chain in a temporary folder; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "fidelity"))
from calibrate import calibrate, links_of  # noqa: E402  # of reports/fidelity
from files import Files, append, digest_of, now, read, seal, sealed  # noqa: E402  # as above
from grid import QUICK, Effort, Environment, Place  # noqa: E402  # as above
from legs import run_environment  # noqa: E402  # as above
from predict import measures  # noqa: E402  # as above

from fleetbench.profile import name_profile  # noqa: E402  # after the path
from fleetbench.quantities import Nanoseconds  # noqa: E402  # as above
from fleetbench.store import commit, machine, versions  # noqa: E402  # as above
from fleetbench.strategy import DistributedStrategy  # noqa: E402  # as above
from fleetbench.workload import LAYERS, HostWork, LayerSpec, Workload  # noqa: E402  # as above
from sim.run import simulate  # noqa: E402  # as above

RATES_MBIT = (50, 100)
STEPS = 64
"""Counted steps of a leg: whole rounds of every cell."""
COVERED = 0.02
"""Share of a step that is to be exposed at most where tau steps cover the transfer."""


def _ms(value: float) -> Nanoseconds:
    return Nanoseconds(round(value * 1e6))


BLOCKS = Workload(
    model=LAYERS, optimizer="sgd", layers=(LayerSpec(name="block", params=31_250, forward=_ms(2.0), backward=_ms(4.0), repeat=8),)
)
"""8 layers of 125 kB: 1 MB of parameters, which fragments divide evenly, and 48 ms of compute a step."""


def name_of(k: int, p: int, tau: int) -> str:
    """Of a cell."""
    return f"K = {k}, P = {p}, tau = {tau}"


def cells() -> dict[str, tuple[int, int, int]]:
    """K, P and tau of every cell."""
    triples = [(k, p, tau) for k in (8, 32) for p in (1, 2, 4) for tau in (0, 1, 2) if tau < k // p]
    return {name_of(*triple): triple for triple in triples}


def strategy(k: int, p: int, tau: int) -> DistributedStrategy:
    """One bucket a fragment."""
    configs: dict[str, Any] = {"k_steps": k, "outer_lr": 0.7, "outer_momentum": 0.9}
    rounds = {"fragments": p, "overlap_steps": tau} if p > 1 or tau else {"schedule": "torch", "begin_step": k}
    return DistributedStrategy.from_dict({"localsgd": True, "localsgd_configs": configs | rounds, "fuse_grad_size_in_MB": 0.0})


def environments() -> tuple[Environment, ...]:
    """One launch a rate; nothing delays a trainer."""
    strategies = {name: strategy(*triple) for name, triple in cells().items()}
    places = [Place(nodes=4, per_node=1, rate_mbit=rate) for rate in RATES_MBIT]
    return tuple(Environment(name=place.name, place=place, strategies=strategies, workload=BLOCKS, steps=STEPS) for place in places)


def predict(files: Files, found: tuple[Environment, ...], effort: Effort) -> None:
    """Calibrate, simulate every cell, and seal what came of it."""
    calibrate(files, found, effort)
    said = {
        environment.name: {"cells": {name: _predicted(files, environment, name) for name in environment.strategies}}
        for environment in found
    }
    entry = {
        "created": now(),
        "commit": commit(),
        "versions": versions(),
        "calibrations": digest_of(files.calibrations),
        "environments": said,
    }
    print(f"predicted and sealed: sha256 {seal(files, entry)}; commit it before you measure", flush=True)


def _predicted(files: Files, environment: Environment, name: str) -> dict[str, Any]:
    _, profile = links_of(files, environment.place)
    assert profile.communication is not None
    experiment = environment.experiment(environment.strategies[name], STEPS)
    whole = next(entry["legs"]["whole"] for entry in reversed(read(files.calibrations)) if entry["place"] == environment.place.name)
    own = HostWork(
        read=_ms(1e3 * whole["other_s"]), update=_ms(1e3 * whole["update_s"])
    )  # of the calibration: a real loop's, never nothing
    experiment = experiment.replace(workload=dataclasses.replace(experiment.workload, host=own))
    with TemporaryDirectory() as folder:
        undeclared = experiment.replace(cluster=dataclasses.replace(experiment.cluster, inter=None))
        run = simulate(name_profile(undeclared, profile, Path(folder) / "profile.toml"), timeline=False)
    trainers, link = environment.place.trainers, profile.communication.link
    nbytes = max(bucket.nbytes for bucket in run.plan.buckets)
    transfer_s = 2 * (trainers - 1) * (link.latency * 1e-9 + nbytes / trainers * 8 / link.bandwidth)  # of the largest fragment
    return {"steps": STEPS, "sim": measures(run), "plan": run.plan.digest, "transfer_s": transfer_s, "by": run.summary.engine}


def is_committed(path: Path) -> bool:
    """Whether git has the file as it is now."""
    listed = subprocess.run(["git", "ls-files", "--error-unmatch", path.name], cwd=path.parent, capture_output=True, check=False)  # noqa: S607  # of the user's path
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", path.name], cwd=path.parent, check=False)  # noqa: S607  # of the user's path
    return listed.returncode == 0 and changed.returncode == 0


def measure(files: Files, found: tuple[Environment, ...], effort: Effort, *, needs_commit: bool) -> None:
    """Every cell twice, in turns and back."""
    digest, predictions = sealed(files)
    if needs_commit and not (is_committed(files.predictions) and is_committed(files.seal)):
        raise SystemExit(
            f"commit {files.predictions.name} and {files.seal.name} first: what is measured must not have been able to change them"
        )
    start = {"kind": "start", "at": now(), "commit": commit(), "predictions": digest, "machine": machine(), "versions": versions()}
    append(files.raw, start)
    for environment in found:
        run_environment(files, environment, predictions["environments"][environment.name]["cells"], digest, effort)


def show(files: Files) -> None:
    """Errors of the run time, and exposed communication beside the formula's."""
    digest, predictions = sealed(files)
    legs = [entry for entry in read(files.raw) if entry["kind"] == "leg" and entry["predictions"] == digest]
    errors, covered = [], []
    print(
        "| Mbit/s | cell | ms a step, simulated | measured | error | A/A | exposed ms a step: simulated | measured | formula | of a step |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for place, said in predictions["environments"].items():
        for name, cell in said["cells"].items():
            own = [leg for leg in legs if (leg["environment"], leg["strategy"]) == (place, name) and leg["counts"]]
            if not own:
                print(f"| {place} | {name} | not measured |")
                continue
            if any(leg["plan"] != cell["plan"] for leg in own):
                raise SystemExit(f"{place}, {name}: another plan than was predicted")
            k, p, tau = cells()[name]
            times = [leg["wall_s"] / leg["steps"] for leg in own]
            simulated, measured = cell["sim"]["wall_s"] / cell["steps"], float(np.mean(times))
            exposed = _at_merges_s([leg["series_us"]["exposed"] for leg in own])
            beside_s = tau * cell["sim"]["compute_s"]
            merges = (STEPS - 1) * p // k
            formula = max(0.0, cell["transfer_s"] - beside_s) * merges / (STEPS - 1)
            errors.append(simulated / measured - 1)
            if tau and cell["transfer_s"] < beside_s:
                covered.append(exposed / measured)
            apart = abs(times[-1] / times[0] - 1)
            print(f"| {place} | {name} | {1e3 * simulated:.1f} | {1e3 * measured:.1f} | {errors[-1]:+.1%} | {apart:.1%} ", end="")
            said_ms = 1e3 * _at_merges_s([cell["sim"]["series_us"]["exposed"]])
            print(f"| {said_ms:.2f} | {1e3 * exposed:.2f} | {1e3 * formula:.2f} | {exposed / measured:.1%} |")
    if errors:
        size = np.abs(errors)
        print(f"\n{len(errors)} cells: mean error {size.mean():.2%} (asked: 2 %), p95 {np.quantile(size, 0.95):.2%} (asked: 5 %)")
    if covered:
        print(f"{len(covered)} cells whose transfer tau steps cover: exposed at most {max(covered):.2%} of a step (asked: {COVERED:.0%})")
    print(f"{sum(not leg['counts'] for leg in legs)} of {len(legs)} legs void; predictions {digest[:16]} of {predictions['created']} UTC")


def _at_merges_s(series_us: list[list[float]]) -> float:
    """Mean exposed seconds a step but for the last, after which a training exchanges all that is left, whatever was in flight."""
    return float(np.mean([of_leg[:-1] for of_leg in series_us])) * 1e-6


def main() -> None:
    """Do one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("predict", "measure", "tables"))
    parser.add_argument("--quick", nargs="?", const="", metavar="FOLDER", help="few cells, in FOLDER or a new one")
    parser.add_argument("--first-look", action="store_true", help="tables of the first grid, predicted without the loop's own work")
    options = parser.parse_args()
    folder = HERE / "first_look" if options.first_look else HERE
    found, files, effort = environments(), Files(folder=folder, prefix="testbed_"), Effort()
    if options.quick is not None:
        folder = Path(options.quick or mkdtemp())
        print(folder)
        files, effort = Files(folder=folder, prefix="testbed_"), QUICK
        found = tuple(_short(environment) for environment in found[1:])
    if options.part == "predict":
        predict(files, found, effort)
    elif options.part == "measure":
        measure(files, found, effort, needs_commit=options.quick is None)
    if options.part != "predict":
        show(files)


def _short(environment: Environment) -> Environment:
    kept = (name_of(8, 1, 0), name_of(8, 2, 1), name_of(8, 4, 1))
    strategies = {name: environment.strategies[name] for name in kept}
    return Environment(name=environment.name, place=environment.place, strategies=strategies, workload=BLOCKS, steps=STEPS)


if __name__ == "__main__":
    main()
