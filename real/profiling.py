"""Profiling: layer times and the cost of communication, measured by a short launch.

Layer times are taken on all trainers of a node at once, without any exchange, at every thread count asked
for. The cost of communication is taken in the training loop, where trainers average at every
step behind their update, so that nothing hides it: once in one bucket, once in a bucket a
gradient. Two totals over the same bytes give the cost a collective and the cost a byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from fleetbench.cluster import Cluster, Link
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Communication, Profile, compute_key
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.result import RunResult
from fleetbench.store import machine, versions
from fleetbench.strategy import DistributedStrategy, LocalSGDConfigs
from fleetbench.workload import LAYERS
from real.leg import Leg
from real.session import Session

_STEPS = 40
_WARMUP = 10
Progress = Callable[[int, int], None]


def ensure_profile(experiment: Experiment, root: Path, *, progress: Progress | None = None) -> Experiment:
    """The experiment with ``workload.profile`` filled in: the file it names, a stored one, or a new one.

    Profiles are stored below ``root / "profiles"`` under a hash of all that changes compute.
    A table of layers needs none, and is returned as it is.
    """
    if experiment.workload.model == LAYERS or experiment.workload.profile is not None:
        return experiment
    folder = root / "profiles"
    path = (folder / f"{_name(experiment)}.toml").resolve()
    if not path.exists():
        profile = take_profile(experiment, progress=progress)
        folder.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    return experiment.replace(workload=dataclasses.replace(experiment.workload, profile=str(path)))


def take_profile(experiment: Experiment, *, progress: Progress | None = None) -> Profile:
    """Measure every thread count of ``tune.thread_num`` and the strategy's own, with the trainers of one node."""
    quiet = experiment.replace(
        cluster=Cluster(trainers_per_node=experiment.cluster.trainers_per_node),
        strategy=DistributedStrategy(thread_num=experiment.strategy.thread_num),
        workload=dataclasses.replace(experiment.workload, profile=None),
    )
    trainers = experiment.cluster.trainers_per_node
    threads = sorted(_threads(experiment))
    total = len(threads) + (2 if trainers > 1 else 0)
    tables = []
    communication = None
    with Session(quiet) as session:
        for number, thread_num in enumerate(threads):
            strategy = experiment.strategy.replace(thread_num=thread_num)
            leg = Leg(strategy=DistributedStrategy(thread_num=thread_num), steps=_STEPS, warmup_steps=_WARMUP, profile=True)
            tables.append(_table(compute_key(experiment, strategy), session.run_profile(leg)))
            if progress is not None:
                progress(number + 1, total)
        if trainers > 1:
            one, every = (
                session.run(_averaging_leg(changes)) for changes in ({"fuse_grad_size_in_MB": 0.0}, {"fuse_all_reduce_ops": False})
            )
            communication = Communication(backend=experiment.run.backend, trainers=trainers, link=_link(one, every, trainers))
            merge = _merge_ns(one, tables[0])
            tables = [dataclasses.replace(table, merge=merge) for table in tables]
            if progress is not None:
                progress(total, total)
    host = machine()
    return Profile(
        machine=f"{host['processor']}, {host['cores']} cores, {host['system']}",
        created=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}",
        tables=tuple(tables),
        communication=communication,
    )


def _threads(experiment: Experiment) -> set[int]:
    return {experiment.strategy.thread_num, *experiment.tune.thread_num}


def _name(experiment: Experiment) -> str:
    keys = [compute_key(experiment, experiment.strategy.replace(thread_num=count)) for count in sorted(_threads(experiment))]
    what = {"tables": keys, "backend": experiment.run.backend, "machine": machine(), "torch": versions()["torch"]}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _averaging_leg(changes: dict[str, Any]) -> Leg:
    strategy = DistributedStrategy(localsgd=True, localsgd_configs=LocalSGDConfigs(k_steps=1), **changes)
    return Leg(strategy=strategy, steps=_STEPS, warmup_steps=_WARMUP)


def _table(key: str, parts: list[dict[str, Any]]) -> LayerTable:
    """One table from all ranks' steps: medians, with the layers' backward from when gradients are final."""
    first = parts[0]
    forward = np.median(np.concatenate([np.asarray(part["forward"]) for part in parts]), axis=0)
    ready = np.median(np.concatenate([np.asarray(part["ready"]) for part in parts]), axis=0)
    backward, update, read = (round(median(value for part in parts for value in part[name])) for name in ("backward", "update", "read"))
    final = {name: min(round(time), backward) for (name, _, _), time in zip(first["gradients"], ready, strict=True)}
    layers: list[Layer] = []
    before = 0
    for name, time in sorted(zip(first["layers"], forward, strict=True), key=lambda item: _last_ready(item[0], final)):
        end = _last_ready(name, final)
        gradients = tuple(
            Gradient(name=gradient, numel=numel, dtype=dtype, ready=Nanoseconds(final[gradient]))
            for gradient, numel, dtype in first["gradients"]
            if gradient.rpartition(".")[0] == name
        )
        layers.append(Layer(name=name, gradients=gradients, forward=Nanoseconds(round(time)), backward=Nanoseconds(end - before)))
        before = end
    layers[-1] = dataclasses.replace(layers[-1], backward=Nanoseconds(layers[-1].backward + backward - before))
    return LayerTable(key=key, layers=tuple(reversed(layers)), update=Nanoseconds(update), read=Nanoseconds(read))


def _last_ready(layer: str, final: dict[str, int]) -> int:
    return max((time for name, time in final.items() if name.rpartition(".")[0] == layer), default=0)


def _stall_s(result: RunResult) -> float:
    """Median over steps and ranks of the communication that was not waiting for a slower rank."""
    counted = result.steps[result.steps["step"] >= 1]
    return float(counted["exposed_comm_s"].median())


def _link(one: RunResult, every: RunResult, trainers: int) -> Link:
    """The ring's link from T = n a + b S at n = 1 and at n = all buckets, for the same S."""
    num_bytes = sum(bucket.nbytes for bucket in one.plan.buckets)
    num_buckets = len(every.plan.buckets)
    whole, split = _stall_s(one), _stall_s(every)
    per_collective = max(0.0, (split - whole) / (num_buckets - 1)) if num_buckets > 1 else 0.0
    transfer = max(whole - per_collective, whole * 0.05, 1e-9)
    return Link(
        latency=Nanoseconds(round(per_collective * 1e9 / (2 * (trainers - 1)))),
        bandwidth=BitsPerSecond(max(1, round(2 * (trainers - 1) / trainers * num_bytes * 8 / transfer))),
    )


def _merge_ns(averaging: RunResult, table: LayerTable) -> Nanoseconds:
    """What an averaging adds to the update: packing deltas and applying their mean."""
    counted = averaging.steps[averaging.steps["step"] >= 1]
    return Nanoseconds(max(0, round(float(counted["update_s"].median()) * 1e9) - table.update))
