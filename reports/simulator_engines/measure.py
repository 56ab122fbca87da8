"""What each engine of the simulator takes, and how far its steps are from the reference engine's.

``python measure.py [CASE ...]`` adds a line a case and engine to ``raw.jsonl``, and ``measure.py tables`` prints them. Every run is a
process of its own, and none takes longer than ``MOST_S``. Engines are those that the code of the commit has, so that an older checkout on
PYTHONPATH measures its own.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from fleetbench import Experiment
from fleetbench.cluster import Cluster, Link
from fleetbench.experiment import Run
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Profile, compute_key, name_profile
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.stragglers import Jitter
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LayerSpec, Workload

HERE = Path(__file__).resolve().parent
MOST_S = 240
FEWER = 10
"""Steps of a collective case, but for the tuner's objective, which has 50 as the example says."""
EXAMPLE = HERE.parent.parent / "examples" / "sixty_four_gpus.toml"
HIERARCHY: dict[str, Any] = {"use_hierarchical_allreduce": True}
SCATTER = HIERARCHY | {"hierarchical_variant": "reduce_scatter"}
TWO = {"nccl_comm_num": 2, "sync_nccl_allreduce": False}
COLLECTIVE: dict[str, dict[str, Any]] = {
    "example": {},
    "local steps": {"localsgd": True, "localsgd_configs": {"k_steps": 4}},
    "hierarchy": HIERARCHY,
    "two communicators": TWO,
    "two communicators, hierarchy": HIERARCHY | TWO,
    "reduce-scatter": SCATTER,
    "two communicators, reduce-scatter": SCATTER | TWO,
}
CONTENDING: dict[str, dict[str, float]] = {
    "contention": {"contention": 0.3},
    "contention of collectives": {"collective_contention": 0.4},
    "both contentions": {"contention": 0.3, "collective_contention": 0.4},
}
ASYNCHRONOUS = {
    "asynchronous, 300 x 5": (300, 5, 1),
    "asynchronous, 600 x 5": (600, 5, 1),
    "asynchronous, 1000 x 5": (1000, 5, 1),
    "asynchronous, 1000 x 20": (1000, 20, 1),
    "asynchronous, 1000 x 100": (1000, 100, 1),
    "asynchronous, 1000 x 10, 4 servers": (1000, 10, 4),
}
CASES = (*COLLECTIVE, *CONTENDING, *ASYNCHRONOUS)
TIMES = ("start_s", "forward_s", "backward_s", "wait_s", "exposed_comm_s", "update_s", "other_s")


def case(name: str) -> tuple[Experiment, Profile | None]:
    """An experiment, and the profile that it needs."""
    if name in COLLECTIVE:
        plain = Experiment.load(EXAMPLE)
        return plain.replace(strategy=DistributedStrategy.from_dict(COLLECTIVE[name])), None
    if name in CONTENDING:
        return contending(CONTENDING[name])
    trainers, steps, servers = ASYNCHRONOUS[name]
    layer = LayerSpec(name="all", params=250_000, forward=Nanoseconds(10_000_000), backward=Nanoseconds(20_000_000))
    return Experiment(
        name="asynchronous",
        workload=Workload(model="layers", layers=(layer,), steps=steps),
        cluster=Cluster(nodes=trainers, servers=servers, inter=gbit(10, 10_000), stragglers=(Jitter(mean=0.3),)),
        strategy=DistributedStrategy.from_dict({"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": 0}}),
        run=Run(warmup_steps=0),
    ), None


def gbit(rate: int, latency_ns: int) -> Link:
    """A link."""
    return Link(bandwidth=BitsPerSecond(rate * 10**9), latency=Nanoseconds(latency_ns))


def contending(table: dict[str, float]) -> tuple[Experiment, Profile]:
    """The example's layers as a profile, whose compute and collectives slow each other."""
    plain = Experiment.load(EXAMPLE)
    experiment = plain.replace(workload=Workload(model="mlp", steps=plain.workload.steps, batch_size=plain.workload.batch_size))
    layers = tuple(
        Layer(
            name=f"layer{index}",
            gradients=(Gradient(name=f"layer{index}.weight", numel=4_200_000, ready=Nanoseconds(2_400_000 * (24 - index))),),
            forward=Nanoseconds(1_200_000),
            backward=Nanoseconds(2_400_000),
        )
        for index in range(24)
    )
    measured = LayerTable(key=compute_key(experiment), layers=layers, **table)
    return experiment, Profile(machine="by hand", created="2026-01-01", tables=(measured,))


def one(name: str, engine: str) -> dict[str, Any]:
    """One simulation in this process, twice: the first one imports."""
    StepTime = _found("sim.many.objective", "sim.objective").StepTime  # noqa: N806  # a class
    from sim.run import simulate

    experiment, profile = case(name)
    with TemporaryDirectory() as folder:
        named = experiment if profile is None else name_profile(experiment, profile, Path(folder) / "profile.toml")
        return _timed(name, engine, named, StepTime, simulate)


def _timed(name: str, engine: str, experiment: Experiment, StepTime: Any, simulate: Any) -> dict[str, Any]:  # noqa: N803  # a class
    if name not in ASYNCHRONOUS:
        StepTime(_of_steps(experiment, 1))(experiment.strategy)
        experiment = experiment if engine == "objective" else _of_steps(experiment, FEWER)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    if engine == "objective":
        step_s = StepTime(experiment)(experiment.strategy)
        found: dict[str, Any] = {"by": "objective", "wall_s": step_s * experiment.workload.steps, "times": None}
    else:
        result = simulate(experiment, engine=engine, timeline=False)
        times = result.steps[list(TIMES)].to_numpy().ravel().tolist() if len(result.steps) else None
        found = {"by": result.summary.engine, "wall_s": result.summary.wall_s, "times": times}
    return {"took_s": time.perf_counter() - begin, "cpu_s": time.process_time() - begin_cpu} | found


def _found(*names: str) -> ModuleType:
    """The first of these modules that the measured code has."""
    return importlib.import_module(next(name for name in names if find_spec(name.rpartition(".")[0]) and find_spec(name)))


def _of_steps(experiment: Experiment, steps: int) -> Experiment:
    return experiment.replace(workload=dataclasses.replace(experiment.workload, steps=steps))


def apart(name: str, engine: str) -> dict[str, Any]:
    """The same in a process of its own."""
    try:
        ended = subprocess.run([sys.executable, __file__, "one", name, engine], capture_output=True, text=True, check=False, timeout=MOST_S)
    except subprocess.TimeoutExpired:
        return {"refused": f"stopped after {MOST_S} s"}
    if ended.returncode:
        return {"refused": ended.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def main(names: list[str]) -> None:
    """Measure cases, and write a line for each engine."""
    engines = _found("sim.engines", "sim.run")
    root = Path(engines.__file__ or "").parent.parent
    command = ["git", "-C", str(root), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    for name in names or CASES:
        reference: dict[str, Any] | None = None
        for engine in ("reference", *(other for other in engines.ENGINES if other != "reference"), "objective"):
            if name in ASYNCHRONOUS and engine not in ("reference", "compiled"):
                continue
            if engine == "compiled" and name not in ASYNCHRONOUS:
                continue
            found = apart(name, engine)
            reference = found if engine == "reference" and "times" in found else reference
            line = {"case": name, "engine": engine, "commit": commit, "at": f"{datetime.now(UTC):%Y-%m-%d %H:%M}"}
            line |= {key: value for key, value in found.items() if key != "times"}
            if "took_s" in found and reference is not None and engine != "objective":
                line["wall_error"] = found["wall_s"] / reference["wall_s"] - 1
                if found["times"] and reference["times"]:
                    line["max_error_s"] = max(abs(one - other) for one, other in zip(found["times"], reference["times"], strict=True))
            print(json.dumps(line), flush=True)
            with (HERE / "raw.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def tables() -> None:
    """Print a row a case and engine: seconds of the clock and of the process, and the largest error of any time of any step."""
    print("| case | commit | engine | by | clock | own time | largest error |\n|---|---|---|---|---|---|---|")
    for text in (HERE / "raw.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "refused" in line:
            took = f"{line['refused']} | | "
        else:
            error = line.get("max_error_s")
            took = f"{line['took_s']:.3g} s | {line['cpu_s']:.3g} s | {'' if error is None else f'{error * 1e9:.3g} ns'}"
        print(f"| {line['case']} | {line['commit']} | {line['engine']} | {line.get('by', '')} | {took} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(one(*sys.argv[2:])))
    elif sys.argv[1:] == ["tables"]:
        tables()
    else:
        main(sys.argv[1:])
