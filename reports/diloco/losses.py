"""Held-out loss of local steps: averaging against an outer optimizer, K = 1, 8, 32, 128, five seeds.

From the repository's root: ``python reports/diloco/losses.py`` trains the character GPT of examples/ with AdamW on 4 ranks (real
engine, gloo) and writes ``losses.csv`` and ``losses.png``; about 8 minutes on two quiet cores. ``--tables`` prints the tables and draws the
picture from what is there. ``--quick`` tries the chain in a temporary folder; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt_rank import build, read_pages
from matplotlib.figure import Figure
from ranks import run_ranks

from fleetbench.cluster import Cluster, Link
from fleetbench.experiment import Experiment
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.store import commit
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LAYERS, LayerSpec, Workload
from sim.run import simulate

HERE = Path(__file__).parent
RANKS, UPDATES, SEEDS = 4, 512, 5
LOCAL_STEPS = (1, 8, 32, 128)
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.9}
BANDWIDTHS_MBIT = (50, 1000)
FORWARD_MS, BACKWARD_MS = 5.0, 10.0
"""Declared, not measured: what a trainer computes a step, for the picture's seconds alone."""
COLUMNS = ("commit", "name", "k_steps", "outer", "seed", "update", "held_out", "ranks_agree", "bytes_sent")


def strategy_of(k_steps: int, outer: bool) -> dict[str, Any]:
    """As a strategy file has it; averaging AdamW's parameters after every update is refused, so that K = 1 averages gradients."""
    if k_steps == 1 and not outer:
        return {}
    configs = {"k_steps": k_steps, "schedule": "torch", "begin_step": k_steps, **(OUTER if outer else {})}
    return {"localsgd": True, "localsgd_configs": configs}


def trainings(seeds: int, local_steps: tuple[int, ...] = LOCAL_STEPS) -> list[dict[str, Any]]:
    """Every way and seed; ways take turns, so that nothing that drifts falls on one of them."""
    return [
        {
            "name": f"K = {k_steps}, {'outer' if outer else 'averaging'}",
            "k_steps": k_steps,
            "outer": outer,
            "seed": seed,
            "strategy": strategy_of(k_steps, outer),
            "every": max(32, k_steps),
        }
        for seed in range(seeds)
        for k_steps in local_steps
        for outer in (False, True)
    ]


def measure(path: Path, todo: list[dict[str, Any]], updates: int) -> None:
    """Train everything in one launch, and keep every look."""
    found = run_ranks(HERE / "gpt_rank.py", RANKS, {"updates": updates, "every": 32, "trainings": todo})
    ways = {training["name"]: training for training in todo}
    with path.open("w", newline="", encoding="utf-8") as out:
        rows = csv.DictWriter(out, COLUMNS, restval="", extrasaction="ignore")
        rows.writeheader()
        for entry in found:
            way = ways[entry["name"]]
            rows.writerow({"commit": commit(), "k_steps": way["k_steps"], "outer": int(way["outer"]), **entry})


def step_s(k_steps: int, outer: bool, bandwidth_mbit: int) -> float:
    """Simulated seconds of an update: four nodes, declared compute, the GPT's parameters."""
    params = sum(parameter.numel() for parameter in build(0, read_pages()[0]).parameters())
    layer = LayerSpec(name="gpt", params=params // 8, forward=_ms(FORWARD_MS / 8), backward=_ms(BACKWARD_MS / 8), repeat=8)
    link = Link(bandwidth=BitsPerSecond(bandwidth_mbit * 10**6), latency=Nanoseconds(200_000))
    experiment = Experiment(
        name="losses",
        workload=Workload(model=LAYERS, layers=(layer,), steps=UPDATES, optimizer="adam"),
        cluster=Cluster(nodes=4, trainers_per_node=1, inter=link),
        strategy=DistributedStrategy.from_dict(strategy_of(k_steps, outer)),
    )
    summary = simulate(experiment, timeline=False).summary
    return summary.wall_s / summary.steps


def _ms(value: float) -> Nanoseconds:
    return Nanoseconds(round(value * 1e6))


Curve = Mapping[int, list[float]]
"""Held-out losses of all seeds by update."""


def read(path: Path) -> dict[tuple[int, bool], Curve]:
    """Every way's curve. Raises ``SystemExit`` where ranks ended apart."""
    curves: dict[tuple[int, bool], dict[int, list[float]]] = {}
    with path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if row["ranks_agree"] == "False":
                raise SystemExit(f"{row['name']}, seed {row['seed']}: ranks end with different parameters")
            if row["held_out"]:
                curve = curves.setdefault((int(row["k_steps"]), row["outer"] == "1"), {})
                curve.setdefault(int(row["update"]), []).append(float(row["held_out"]))
    return dict(curves)


def show(path: Path, picture: Path) -> None:
    """Print the tables and draw the picture."""
    curves = read(path)
    seconds = {(way, rate): step_s(*way, rate) for way in curves for rate in BANDWIDTHS_MBIT}
    last = max(max(curve) for curve in curves.values())
    columns = " | ".join(f"ms an update at {rate} Mbit/s, simulated" for rate in BANDWIDTHS_MBIT)
    print(f"| K | way | held-out loss after {last} updates, mean of seeds | min, max | {columns} |")
    print("|---|---|---|---|" + "---|" * len(BANDWIDTHS_MBIT))
    for (k_steps, outer), curve in sorted(curves.items()):
        ends = curve[last]
        took = " | ".join(f"{1e3 * seconds[(k_steps, outer), rate]:.1f}" for rate in BANDWIDTHS_MBIT)
        way = "outer" if outer else "gradients" if k_steps == 1 else "averaging"
        print(f"| {k_steps} | {way} | {statistics.mean(ends):.4f} (n = {len(ends)}) | {min(ends):.4f}, {max(ends):.4f} | {took} |")
    figure = Figure(figsize=(13.0, 4.2), layout="constrained")
    axes = figure.subplots(1, 1 + len(BANDWIDTHS_MBIT), sharey=True)
    for (k_steps, outer), curve in sorted(curves.items()):
        number = 1 + LOCAL_STEPS.index(k_steps) if k_steps in LOCAL_STEPS else 0
        look: dict[str, Any] = {"color": f"C{number}", "marker": "xos^Dv"[number], "linestyle": "-" if outer else "--", "markevery": 3}
        look |= {"markersize": 5, "markerfacecolor": "none"}
        updates, losses = sorted(curve), [statistics.mean(curve[update]) for update in sorted(curve)]
        label = f"K = {k_steps}, {'outer 0.7, 0.9' if outer else 'gradients averaged' if k_steps == 1 else 'averaging'}"
        axes[0].plot(updates, losses, label=label, **look)
        for place, rate in zip(axes[1:], BANDWIDTHS_MBIT, strict=True):
            place.plot([update * seconds[(k_steps, outer), rate] for update in updates], losses, **look)
    axes[0].set(xlabel="updates", ylabel="held-out loss, mean of seeds")
    for place, rate in zip(axes[1:], BANDWIDTHS_MBIT, strict=True):
        place.set(xlabel=f"simulated seconds at {rate} Mbit/s", xscale="log")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(picture, dpi=130)
    print(f"\n{picture}")


def main() -> None:
    """Train, or show what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) if options.quick else HERE
    if not options.tables:
        measure(folder / "losses.csv", trainings(1, (1, 8)) if options.quick else trainings(SEEDS), 64 if options.quick else UPDATES)
    show(folder / "losses.csv", folder / "losses.png")


if __name__ == "__main__":
    main()
