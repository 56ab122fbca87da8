"""How fast the simulator's engines are, and whether what they say at that size is right.

Run from the repository's root: ``python reports/simulator_speed/measure.py``. Takes about three minutes;
writes ``raw.json`` and ``scaling.png``, and prints the tables of README.md. Every run is in a process of
its own on one core, but for the tuner's objective, which gets two.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import resource
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from fleetbench import Experiment
from fleetbench.cluster import Cluster, Link
from fleetbench.experiment import Run, Tune
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.store import machine, versions
from fleetbench.stragglers import Jitter
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LayerSpec, LossCurve, Workload

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent.parent / "tests")]
from resnet50 import resnet50_gradients  # noqa: E402  # the table of the paper is the tests'

FORWARD_NS, BACKWARD_NS = 100_000_000, 200_000_000
BASE_S = (FORWARD_NS + BACKWARD_NS) / 1e9
JITTER = Jitter(distribution="lognormal", mean=0.1, cv=1.0)
NUM_EVALUATIONS = 10_000
TRAINERS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
STEPS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
LAYERS = (1, 3, 10, 30, 100, 300, 1_000)


def resnet50_layers() -> tuple[LayerSpec, ...]:
    """A layer for each of the 161 gradients, all with the same share of compute."""
    gradients = resnet50_gradients(classes=1000)[::-1]
    return equal_layers([gradient.numel for gradient in gradients])


def equal_layers(numels: list[int]) -> tuple[LayerSpec, ...]:
    """Layers with these many parameters that share the compute."""
    share = [len(numels) * [0], len(numels) * [0]]
    for part, whole in zip(share, (FORWARD_NS, BACKWARD_NS), strict=True):
        ends = [whole * (index + 1) // len(numels) for index in range(len(numels))]
        part[:] = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return tuple(
        LayerSpec(name=f"layer{index}", params=numel, forward=Nanoseconds(share[0][index]), backward=Nanoseconds(share[1][index]))
        for index, numel in enumerate(numels)
    )


def experiment(trainers: int, steps: int, layers: tuple[LayerSpec, ...] | None = None, **strategy: Any) -> Experiment:
    """Eight trainers a node where they divide; links so fast that backward hides all but the last bucket."""
    each = 8 if trainers % 8 == 0 else 1
    fast = Link(bandwidth=BitsPerSecond(3_600 * 10**9))
    return Experiment(
        name="speed",
        workload=Workload(model="layers", layers=layers or resnet50_layers(), steps=steps),
        cluster=Cluster(nodes=trainers // each, trainers_per_node=each, intra=fast, inter=fast, stragglers=(JITTER,)),
        strategy=DistributedStrategy.from_dict({"fuse_grad_size_in_MB": 32} | strategy),
        run=Run(warmup_steps=0, backend="nccl", device="cuda"),
    )


def one_run(engine: str, trainers: int, steps: int, num_layers: int, repeats: int) -> dict[str, Any]:
    """Seconds of ``simulate``, what it says, and the most memory that the process had."""
    from sim.run import simulate

    layers = equal_layers([25_557_032 // num_layers] * num_layers) if num_layers else None
    what = experiment(trainers, steps, layers, **({"fuse_all_reduce_ops": False} if num_layers else {}))
    simulate(
        experiment(16, 3), engine="vector" if engine == "reference" else engine, timeline=False, table=False
    )  # imports, and first calls
    took, cpu = [], []
    for _ in range(repeats):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        summary = simulate(what, engine=engine, timeline=False, table=False).summary  # type: ignore[arg-type]  # one of their names
        took.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
    return {
        "engine": summary.engine,
        "trainers": trainers,
        "steps": steps,
        "layers": num_layers or 161,
        "took_s": took,
        "cpu_s": cpu,
        "compute_and_wait_s": summary.compute_s + summary.wait_s,
        "step_s": summary.step_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def apart(engine: str, trainers: int, steps: int, num_layers: int = 0, repeats: int = 3) -> dict[str, Any]:
    """``one_run`` in a process of its own, on one core."""
    core = max(os.sched_getaffinity(0))
    command = [sys.executable, __file__, "one", engine, *map(str, (trainers, steps, num_layers, repeats))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(["taskset", "-c", str(core), *command], capture_output=True, text=True, env=environment, check=True)  # noqa: S607  # util-linux, wherever it is
    return json.loads(done.stdout)  # type: ignore[no-any-return]  # what ``one_run`` returned


def largest_of(count: int) -> tuple[float, float]:
    """Mean and standard deviation of the largest of so many X, by integrating their law."""
    sigma = math.sqrt(math.log1p(JITTER.cv**2))
    law = stats.lognorm(s=sigma, scale=JITTER.mean * math.exp(-(sigma**2) / 2))
    x = np.concatenate(([0.0], np.geomspace(1e-6, 1e4, 400_000)))
    beyond = -np.expm1(count * law.logcdf(x))
    mean = float(np.trapezoid(beyond, x))
    return mean, math.sqrt(float(np.trapezoid(2 * x * beyond, x)) - mean**2)


def objective_experiment() -> Experiment:
    """What a search looks at: 256 trainers, 200 steps, slower links, and a target that prices local steps."""
    plain = experiment(256, 200)
    workload = dataclasses.replace(plain.workload, target_loss=0.5, loss_curve=LossCurve(start=2.0, floor=0.1, half_life=50.0))
    inter, intra = (Link(bandwidth=BitsPerSecond(rate * 10**9), latency=Nanoseconds(3_000)) for rate in (25, 600))
    return plain.replace(workload=workload, cluster=dataclasses.replace(plain.cluster, inter=inter, intra=intra), tune=Tune())


def evaluations(seed: int, count: int) -> tuple[list[float], float]:
    """Seconds of a step of so many random strategies of the tuner's space, each with another limit of fusion; and of this process."""
    from sim.many.objective import StepTime

    draw, base = random.Random(seed), objective_experiment()  # noqa: S311  # no secret
    step_s = StepTime(base)
    found = []
    begin = time.process_time()
    for _ in range(count):
        strategy = {"fuse_grad_size_in_MB": 2 ** draw.uniform(-2, 6)}
        local_steps, communicators = draw.choice(base.tune.local_steps), draw.choice(base.tune.nccl_comm_num)
        if communicators > 1:
            strategy |= {"nccl_comm_num": communicators, "sync_nccl_allreduce": False}
        if local_steps > 1:
            strategy |= {"localsgd": True, "localsgd_configs": {"k_steps": local_steps}}
        found.append(step_s(DistributedStrategy.from_dict(strategy)))
    return found, time.process_time() - begin


def searched() -> dict[str, Any]:
    """The tuner's objective by two processes; some values are checked against ``simulate``."""
    from sim.many.objective import StepTime
    from sim.run import simulate

    begin = time.perf_counter()
    with ProcessPoolExecutor(2) as pool:
        parts = list(pool.map(evaluations, (0, 1), (NUM_EVALUATIONS // 2,) * 2))
    took_s = time.perf_counter() - begin
    values = [value for found, _ in parts for value in found]
    base = objective_experiment()
    worst = 0.0
    for strategy in ({}, {"nccl_comm_num": 2, "sync_nccl_allreduce": False}, {"localsgd": True, "localsgd_configs": {"k_steps": 4}}):
        asked = DistributedStrategy.from_dict({"fuse_grad_size_in_MB": 4} | strategy)
        summary = simulate(base.replace(strategy=asked), timeline=False).summary
        worst = max(worst, abs(StepTime(base)(asked) / (summary.wall_s / summary.steps) - 1))
    return {
        "evaluations": len(values),
        "took_s": took_s,
        "cpu_s": sum(cpu_s for _, cpu_s in parts),
        "different_values": len(set(values)),
        "worst_relative_difference": worst,
    }


def main() -> None:
    """Measure everything, write it down, and draw the picture."""
    raw: dict[str, Any] = {
        "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": machine(),
        "versions": versions(),
        "load_before": os.getloadavg(),
    }
    mean, deviation = largest_of(10_000)
    raw["expected"] = {"compute_and_wait_s": BASE_S * (1 + mean), "standard_error_s": BASE_S * deviation / math.sqrt(1_000)}
    raw["exact"] = apart("vector", 10_000, 1_000, repeats=3)
    raw["reference"] = [apart("reference", 10_000, steps, repeats=1) for steps in (1, 4)]
    raw["reference_small"] = [apart("reference", trainers, 10, repeats=1) for trainers in (10, 100, 1_000)]
    raw["trainers"] = [apart("vector", trainers, 100) for trainers in TRAINERS]
    raw["steps"] = [apart("vector", 1_000, steps) for steps in STEPS]
    raw["layers"] = [apart("vector", 1_000, 100, layers) for layers in LAYERS]
    raw["objective"] = searched()
    raw["load_after"] = os.getloadavg()
    (HERE / "raw.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    from figures import draw, tables

    draw(raw)
    print(tables(raw))


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        engine, *numbers = sys.argv[2:]
        print(json.dumps(one_run(engine, *map(int, numbers))))
    else:
        main()
