"""Is a declared network simulated as it is? Predictions for drawn clusters, committed before they run on the testbed.

``predict`` draws a seed and with it clusters of 2 to 4 hosts, 50 to 200 Mbit/s and 0 to 20 ms, simulates three strategies on each, and
writes declared_predictions.json. Commit it: ``measure`` runs what is committed, and nothing else. ``tables`` prints the errors. Nothing is
calibrated. ``queues`` predicts what was measured anew, with other lengths of gloo's queue, of both grids.
``--quick`` tries the chain with two clusters, for figures that mean nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import shutil
import statistics
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from fleetbench.experiment import Experiment
from fleetbench.store import machine, new_run_id, versions
from fleetbench.strategy import DistributedStrategy
from real.job.session import Session
from real.leg import Leg
from sim.run import simulate

HERE = Path(__file__).parent
QUICK = Path("runs") / "declared-quick"
CLUSTERS, LEG_S, WARMUP = 10, 7.0, 8
PAYLOAD = 1448 / 1514
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "one bucket": {"fuse_all_reduce_ops": True, "fuse_grad_size_in_MB": 64.0},
    "small buckets": {"fuse_all_reduce_ops": True, "fuse_grad_size_in_MB": 0.25},
    "local, K = 4": {"localsgd": True, "localsgd_configs": {"k_steps": 4}},
}
LAYERS, FORWARD_MS, BACKWARD_MS = 16, 3.0, 6.0
LAUNCHES = 3


def drawn(seed: int, number: int) -> dict[str, Any]:
    """A cluster and a workload: compute of 144 ms, gradients whose bytes take 0.4 to 1.4 of it; every fifth cluster has no latency."""
    draw = random.Random(f"{seed}/{number}")  # noqa: S311  # not for security
    hosts, mbit = draw.randint(2, 4), round(draw.uniform(50, 200))
    latency_us = 0 if number % 5 == 0 else round(1000 * 0.5 * 40 ** draw.random())
    wire_s = draw.uniform(0.4, 1.4) * LAYERS * (FORWARD_MS + BACKWARD_MS) / 1000
    params = round(wire_s * mbit * 1e6 * PAYLOAD / 8 / (2 * (hosts - 1) / hosts) / 4 / LAYERS)
    layer = {"name": "block", "params": params, "forward": f"{FORWARD_MS} ms", "backward": f"{BACKWARD_MS} ms", "repeat": LAYERS}
    return {
        "schema": 1,
        "name": f"declared-{number}",
        "workload": {"model": "layers", "steps": 10, "layers": [layer]},
        "cluster": {
            "nodes": hosts,
            "collective": "gloo",
            "inter": {"bandwidth": f"{mbit} Mbit/s", "latency": f"{latency_us} us"},
        },
        "run": {"launcher": "testbed", "device": "emulated", "warmup_steps": WARMUP, "seed": seed % 2**31},
    }


def experiment_of(declared: Mapping[str, Any], strategy: str, steps: int) -> Experiment:
    """What is simulated, and what runs."""
    workload = {**declared["workload"], "steps": steps}
    return Experiment.from_dict({**declared, "workload": workload, "strategy": dict(STRATEGIES[strategy])})


def step_s(experiment: Experiment) -> tuple[float, float]:
    """Simulated seconds of a mean step, and how often in a step trainers average."""
    summary = simulate(experiment, timeline=False).summary
    return summary.wall_s / experiment.workload.steps, summary.num_syncs / experiment.workload.steps


def closed_forms(experiment: Experiment, syncs: float) -> dict[str, float]:
    """Seconds of a step: compute and bytes over bandwidth; compute and a ring, with latency; and a ring that hides behind the backward."""
    (layer,) = experiment.workload.layers
    cluster = experiment.cluster
    assert cluster.inter is not None
    compute_s = LAYERS * (FORWARD_MS + BACKWARD_MS) / 1000
    share = 2 * (cluster.nodes - 1)
    wire_s = share / cluster.nodes * 4 * layer.params * LAYERS * 8 / (cluster.inter.bandwidth * PAYLOAD)
    ring_s = wire_s + share * cluster.inter.latency * 1e-9
    hidden_s = 0.0 if experiment.strategy.localsgd else LAYERS * BACKWARD_MS / 1000
    return {
        "compute + bytes / bandwidth": compute_s + syncs * wire_s,
        "ring": compute_s + syncs * ring_s,
        "max(backward, ring)": compute_s - hidden_s + max(hidden_s, syncs * ring_s),
    }


def predict(folder: Path, clusters: int, leg_s: float) -> None:
    """Draw, simulate and write."""
    seed = secrets.randbits(32)
    cells = []
    for number in range(clusters):
        declared = drawn(seed, number)
        for strategy in STRATEGIES:
            rough, _ = step_s(experiment_of(declared, strategy, 8))
            steps = 4 * max(2, round(leg_s / rough / 4))
            experiment = experiment_of(declared, strategy, steps)
            ring = {**declared, "cluster": {**declared["cluster"], "collective": "ring"}}
            simulated_s, syncs = step_s(experiment)
            predicted = {"simulator": simulated_s, "simulator, ring": step_s(experiment_of(ring, strategy, steps))[0]}
            cells.append(
                {"declared": declared, "strategy": strategy, "steps": steps, "predicted_s": predicted | closed_forms(experiment, syncs)}
            )
            print(declared["name"], declared["cluster"], strategy, cells[-1]["predicted_s"], flush=True)
    text = json.dumps({"seed": seed, "versions": versions(), "cells": cells}, indent=1)
    (folder / "declared_predictions.json").write_text(text + "\n", encoding="utf-8")


def git(*arguments: str) -> str:
    """What it prints."""
    program = shutil.which("git")
    assert program is not None
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout.strip()


def measure(folder: Path, *, committed: bool) -> None:
    """Run every cell; a cluster whose launch fails is launched again. Results are appended as they come."""
    file, raw = folder / "declared_predictions.json", folder / "declared_raw.jsonl"
    commit = ""
    if committed:
        if git("status", "--porcelain", str(file)):
            raise SystemExit(f"{file} is not committed as it is: commit the predictions first")
        commit = git("log", "-1", "--format=%H", "--", str(file))
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    with raw.open("a", encoding="utf-8") as out:
        out.write(json.dumps({"kind": "start", "run": new_run_id(), "predictions": commit, "machine": machine()}) + "\n")
        for name in dict.fromkeys(cell["declared"]["name"] for cell in cells):
            pending = [cell for cell in cells if cell["declared"]["name"] == name]
            for _ in range(LAUNCHES):
                try:
                    run(pending, out)
                except (EnvironmentLacks, WorkerFailed) as error:
                    out.write(json.dumps({"kind": "failed", "cluster": name, "error": str(error)}) + "\n")
                    print(name, error, flush=True)
                if not pending:
                    break


def run(pending: list[dict[str, Any]], out: Any) -> None:
    """The cells of one cluster in one launch; what has run is taken from the list."""
    first = pending[0]
    with Session(experiment_of(first["declared"], first["strategy"], first["steps"])) as session:
        while pending:
            cell = pending[0]
            strategy = DistributedStrategy.from_dict(dict(STRATEGIES[cell["strategy"]]))
            result = session.run(Leg(strategy=strategy, steps=cell["steps"], warmup_steps=WARMUP))
            summary, testbed = result.summary, result.testbed
            assert testbed is not None
            measured = {
                "kind": "leg",
                "cluster": cell["declared"]["name"],
                "strategy": cell["strategy"],
                "step_s": summary.wall_s / cell["steps"],
                "step_p50_s": summary.step_s["p50"],
                "counts": testbed["counts"],
                "void": [block["void"] for block in testbed["blocks"]],
                "round_trips": testbed["round_trips"],
                "skipped": [entry["what"] for entry in summary.skipped],
                "lateness_s": summary.lateness_s,
            }
            out.write(json.dumps(measured) + "\n")
            out.flush()
            print(measured["cluster"], measured["strategy"], f"{measured['step_s']:.4f} s, predicted", cell["predicted_s"], flush=True)
            pending.pop(0)


def tables(folder: Path) -> None:
    """Errors of run times, predicted over measured less one: of every cell, and of each way to predict."""
    cells = json.loads((folder / "declared_predictions.json").read_text(encoding="utf-8"))["cells"]
    lines = [json.loads(line) for line in (folder / "declared_raw.jsonl").read_text(encoding="utf-8").splitlines()]
    legs = {(leg["cluster"], leg["strategy"]): leg for leg in lines if leg["kind"] == "leg"}
    ways = list(cells[0]["predicted_s"])
    errors: dict[str, list[float]] = {way: [] for way in ways}
    print(f"| hosts | link | strategy | measured, ms | {' | '.join(ways)} |\n|---|---|---|---|{'---|' * len(ways)}")
    for cell in cells:
        leg, cluster = legs.get((cell["declared"]["name"], cell["strategy"])), cell["declared"]["cluster"]
        if leg is None or not leg["counts"]:
            print(
                f"| {cluster['nodes']} | {cluster['inter']} | {cell['strategy']} | {'void' if leg else 'not measured'} |{' |' * len(ways)}"
            )
            continue
        row = {way: cell["predicted_s"][way] / leg["step_s"] - 1 for way in ways}
        for way, error in row.items():
            errors[way].append(abs(error))
        link = f"{cluster['inter']['bandwidth']}, {cluster['inter']['latency']}"
        percents = " | ".join(f"{row[way]:+.1%}" for way in ways)
        print(f"| {cluster['nodes']} | {link} | {cell['strategy']} | {1e3 * leg['step_s']:.1f} | {percents} |")
    for way, found in errors.items():
        if len(found) > 1:
            p95 = statistics.quantiles(found, n=20, method="inclusive")[-1]
            print(f"{way}: mean {statistics.mean(found):.2%}, p95 {p95:.2%}, largest {max(found):.2%}, n = {len(found)}")


def queues() -> None:
    """Errors of both grids, where what a rank tells waits for none of its own data, for as much as is built in, and for 3 ms of it."""
    from sim.network import gloo

    for folder in (HERE / "earlier", HERE):
        cells = json.loads((folder / "declared_predictions.json").read_text(encoding="utf-8"))["cells"]
        lines = map(json.loads, (folder / "declared_raw.jsonl").read_text(encoding="utf-8").splitlines())
        measured_s = {(leg["cluster"], leg["strategy"]): leg["step_s"] for leg in lines if leg["kind"] == "leg" and leg["counts"]}
        for queue_ns in (0, 1_171_875, 3_000_000):
            gloo.QUEUE_NS = queue_ns
            errors = [
                abs(step_s(experiment_of(cell["declared"], cell["strategy"], cell["steps"]))[0] / real_s - 1)
                for cell in cells
                if (real_s := measured_s.get((cell["declared"]["name"], cell["strategy"])))
            ]
            p95 = statistics.quantiles(errors, n=20, method="inclusive")[-1]
            print(f"{folder.name}, {queue_ns / 1e6:.2f} ms: mean {statistics.mean(errors):.2%}, p95 {p95:.2%}, n = {len(errors)}")


def main() -> None:
    """Do what is asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("predict", "measure", "tables", "queues"))
    parser.add_argument("--quick", action="store_true", help="two clusters and short legs, in a folder of their own")
    options = parser.parse_args()
    folder = QUICK if options.quick else HERE
    folder.mkdir(parents=True, exist_ok=True)
    if options.what == "predict":
        predict(folder, 2 if options.quick else CLUSTERS, 2.0 if options.quick else LEG_S)
    elif options.what == "measure":
        measure(folder, committed=not options.quick)
    elif options.what == "queues":
        queues()
    else:
        tables(folder)


if __name__ == "__main__":
    main()
