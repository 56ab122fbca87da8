"""Time to a target: the tuner that asks virtual trainers, with and without other learning rates, beside the one that asks none.

The latter ranks ways of training by the seconds of a step alone.

    python reports/tuner/targets.py            # twelve scenarios drawn by SEED; writes targets.json
    python reports/tuner/targets.py --print    # the table of README.md, from it

Each scenario is a small network on noisy labels, some with unlike data, on a cluster whose links are chosen so that in half of them the
best K of plain local steps is 2 or 4. All tuners run whole; "real" runs are simulated ones, with losses by virtual trainers. What each
recommends is then priced anew: simulated seconds of a step times the median steps to the target over fresh seeds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetbench.config import encode
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key
from fleetbench.result import RunResult
from fleetbench.store import commit
from fleetbench.strategy import DistributedStrategy, LocalSGDConfigs
from fleetbench.workloads.models.registry import build_model
from real.leg import Leg
from sim.learning.virtual_training import train
from sim.many.objective import StepTime
from sim.run import simulate
from tuner.learning import by_virtual_trainers
from tuner.space import name_of
from tuner.tune import tune

SEED = 20261126
HERE = Path(__file__).parent
DRAWN, FRESH = range(100, 103), range(200, 300)
"""Seeds by which a scenario is drawn, and, none of which anything else has seen, by which recommendations are priced."""
STEPS = 200
LEVELS = (1, 2, 4, 8, 16)
FORWARD_NS, BACKWARD_NS = 1_000_000, 2_000_000
"""Of each layer."""
TUNERS = ("before", "at its rate", "now")
"""The one that ranks by the seconds of a step; the one that asks virtual trainers, at the learning rate of the file alone, and whole."""
SHARES = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""An all-reduce of all gradients over a step's compute."""


def drawn(dice: random.Random, name: str, folder: Path, *, unlike: bool) -> Experiment:
    """A workload and its trainers; the target is what synchronous training has reached after half of the steps."""
    workload = {
        "model": "mlp",
        "data": "synthetic",
        "data_options": {"samples": 8192, "teacher": 32, "noise": dice.choice((0.1, 0.2, 0.3))},
        "batch_size": dice.choice((8, 16)),
        "steps": STEPS,
        "eval_every": 5,
        "lr": dice.choice((0.1, 0.2, 0.4)),
        "unlike_data": 0.5 if unlike else dice.choice((0.0, 0.5)),
    }
    jitter = [{"kind": "jitter", "distribution": "exponential", "mean": dice.choice((0.1, 0.3))}]
    cluster = {"nodes": 4, "trainers_per_node": 1, "stragglers": jitter}
    few = {"nccl_comm_num": [1], "thread_num": [1], "wire": ["fp32"], "fuse_grad_size_in_MB": [0.25, 32.0], "fusion": []}
    few |= {"pairs": 8, "leg_steps": 48, "search_seconds": 600.0}
    experiment = Experiment.from_dict({"name": name, "workload": workload, "cluster": cluster, "tune": few})
    held_out = dict(train(experiment).held_out)
    known = {"target_loss": round(held_out[STEPS // 2], 3), "profile": str(profiled(experiment, folder / f"{name}.toml"))}
    return experiment.replace(workload=dataclasses.replace(experiment.workload, **known))


def profiled(experiment: Experiment, path: Path) -> Path:
    """Layer times by decree, for the real model's gradients."""
    model = build_model(experiment.workload.model, experiment.workload.model_options, "float32", 0)
    names = [(name, parameter.numel()) for name, parameter in model.named_parameters()]
    layers, left = [], len(names) // 2
    for index in range(0, len(names), 2):
        ready = left * BACKWARD_NS
        gradients = tuple(Gradient(name=name, numel=numel, ready=ready) for name, numel in reversed(names[index : index + 2]))
        layers.append(Layer(name=names[index][0].rpartition(".")[0], gradients=gradients, forward=FORWARD_NS, backward=BACKWARD_NS))
        left -= 1
    table = LayerTable(key=compute_key(experiment, DistributedStrategy()), layers=tuple(layers))
    Profile(machine="none", created="never", tables=(table,)).save(path)
    return path


def linked(experiment: Experiment, share: float) -> Experiment:
    """With links whose all-reduce of all gradients takes ``share`` of a step's compute, a tenth of it latency."""
    model = build_model(experiment.workload.model, experiment.workload.model_options, "float32", 0)
    trainers, layers = experiment.cluster.trainers, len([*model.parameters()]) // 2
    nbytes, seconds = 4 * sum(value.numel() for value in model.parameters()), share * layers * (FORWARD_NS + BACKWARD_NS) * 1e-9
    bandwidth = 2 * (trainers - 1) / trainers * nbytes / (0.9 * seconds)
    latency = 0.1 * seconds / (2 * (trainers - 1))
    inter = {"bandwidth": f"{bandwidth / 1e6:.6g} MB/s", "latency": f"{latency * 1e6:.6g} us"}
    data = encode(experiment)
    return Experiment.from_dict(data | {"cluster": data["cluster"] | {"inter": inter}})


def local(k_steps: int) -> DistributedStrategy:
    """Plain local steps."""
    return DistributedStrategy(localsgd=k_steps > 1, localsgd_configs=LocalSGDConfigs(k_steps=k_steps))


def median_steps(experiment: Experiment, seeds: Sequence[int]) -> float:
    """Over the seeds; infinite where half never arrive."""
    runs = (experiment.replace(run=dataclasses.replace(experiment.run, seed=seed)) for seed in seeds)
    found = (by_virtual_trainers(one, math.inf) for one in runs)
    return statistics.median(math.inf if steps is None else steps for steps in found)


def seconds_of(experiment: Experiment, strategy: DistributedStrategy) -> float:
    """Of a step, over sixty rounds of the largest K."""
    longer = experiment.replace(workload=dataclasses.replace(experiment.workload, steps=960))
    return StepTime(longer)(strategy)


@dataclass
class SimulatedRuns:
    """Runs legs in the simulator; those to the target have what virtual trainers learn."""

    experiment: Experiment
    startup_s: float = 0.0
    known: dict[str, Any] = field(default_factory=dict)

    def run(self, leg: Leg) -> RunResult:
        """See ``tuner.real_runs.Runner``; windows of stragglers are seeds here."""
        run = dataclasses.replace(self.experiment.run, seed=leg.seed if leg.seed is not None else leg.window + 1)
        workload = dataclasses.replace(self.experiment.workload, steps=leg.steps)
        own = self.experiment.replace(run=run, workload=workload, strategy=leg.strategy)
        if not leg.evaluate:
            return simulate(own, timeline=False)
        learnt = train(own, until=workload.target_loss)  # it ends at the target, as a real run does
        workload = dataclasses.replace(workload, steps=learnt.workload.steps)
        return simulate(own.replace(workload=workload), timeline=False, learnt=learnt)

    def together(self, legs: Sequence[Leg]) -> None:
        """Nothing."""


def scenario(dice: random.Random, name: str, folder: Path, *, wants_middle: bool) -> dict[str, Any] | None:
    """One row; none where no link makes the best K what is wanted."""
    experiment = drawn(dice, name, folder, unlike=wants_middle)
    updates = {k: median_steps(experiment.replace(strategy=local(k)), DRAWN) for k in LEVELS}
    shares = dice.sample(SHARES, len(SHARES))
    for share in shares:
        own = linked(experiment, share)
        best = min(LEVELS, key=lambda k: updates[k] * seconds_of(own, local(k)))
        if (best in (2, 4)) == wants_middle:
            break
    else:
        return None
    row: dict[str, Any] = {"name": name, "share": share, "best_k": best, "updates": updates, "experiment": encode(own)}
    for tuner in TUNERS:
        stands_in = simulate if tuner == "before" else None  # beside which no virtual trainers are asked
        tuned = own.replace(tune=dataclasses.replace(own.tune, lr_scale=(1.0,))) if tuner == "at its rate" else own
        found, _ = tune(tuned, out=folder / name / tuner, runner=SimulatedRuns(tuned), simulate=stands_in)
        timed = next(arm.timed for arm in found.arms if arm.strategy == found.strategy)  # of adaptive K, as the tuner times it
        steps, step_s = median_steps(own.replace(strategy=found.strategy), FRESH), seconds_of(own, timed)
        row[tuner] = {"line": found.line, "way": name_of(found.strategy), "steps": steps, "seconds": steps * step_s, "notes": found.notes}
    default_s = median_steps(own, FRESH) * seconds_of(own, DistributedStrategy())
    for tuner in TUNERS:
        row[tuner] |= {"over_default": default_s / row[tuner]["seconds"], "over_before": row["before"]["seconds"] / row[tuner]["seconds"]}
    return row


def measure() -> None:
    """All scenarios, one after the other."""
    dice, rows = random.Random(SEED), list[dict[str, Any]]()  # noqa: S311  # drawn again by who checks it
    with tempfile.TemporaryDirectory() as folder:
        for draw in range(60):
            wants_middle = sum(row["best_k"] in (2, 4) for row in rows) < 6
            row = scenario(dice, f"drawn-{draw}", Path(folder), wants_middle=wants_middle)
            if row is not None:
                rows.append(row)
                print(line_of(row), flush=True)
            if len(rows) == 12:
                break
    found = {"commit": commit(), "seed": SEED, "rows": rows}
    (HERE / "targets.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    cluster, workload = row["experiment"]["cluster"], row["experiment"]["workload"]
    steps = " / ".join("never" if math.isinf(value) else f"{value:.0f}" for value in row["updates"].values())
    cells = [
        f"{cluster['nodes']}",
        f"{workload.get('unlike_data', 0)}",
        f"{row['share']:g}",
        steps,
        *(row[tuner]["way"] for tuner in TUNERS),
    ]
    gains = [f"{row['now']['over_default']:.2f}x", *(f"{row[tuner]['over_before']:.2f}x" for tuner in TUNERS[1:])]
    gains.insert(1, row["now"]["line"].partition("]")[0].rpartition(": ")[2] + "]")
    return f"| {' | '.join([*cells, *gains])} |"


def show() -> None:
    """The table."""
    rows = json.loads((HERE / "targets.json").read_text(encoding="utf-8"))["rows"]
    of_scenario, gains = (
        "trainers | unlike data | exchange / compute | steps at K = 1 / 2 / 4 / 8 / 16",
        "at its rate, over before | over before",
    )
    print(f"| {of_scenario} | before | at its rate | now | over default | promised | {gains} |")
    print("|" + "---|" * 11)
    print("\n".join(map(line_of, rows)))
    for tuner in TUNERS[1:]:
        ratios = [row[tuner]["over_before"] for row in rows]
        print(f"{tuner}: geometric mean {statistics.geometric_mean(ratios):.2f}x, least {min(ratios):.2f}x")


if __name__ == "__main__":
    show() if sys.argv[1:] == ["--print"] else measure()
