"""Profiling: layer times and the cost of communication, measured by a short launch.

Layer times are taken on all trainers of a node at once, with the compute part of the strategy as it
will be (mixed precision, recompute, fused operations) and without any exchange of gradients, at
every thread count asked for. By how much compute slows while a collective is in flight is measured
in the same leg. The cost of communication is taken in the training loop, where trainers average at every
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
from fleetbench.profile import Communication, Profile, compute_key, compute_part
from fleetbench.quantities import BitsPerSecond, Bytes, Nanoseconds
from fleetbench.result import RunResult
from fleetbench.store import machine, versions
from fleetbench.strategy import BuildStrategy, DistributedStrategy, LocalSGDConfigs
from fleetbench.workload import LAYERS
from real.leg import Leg
from real.profile_leg import LEAST_STEPS
from real.session import Session

_STEPS = 40
_WARMUP = 10
_MAX_S = 10.0
"""Seconds that a leg may take, unless three steps take longer."""
_METHOD = 2
"""Of measuring: profiles that were stored by an older one are taken again."""
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
    trainers = experiment.cluster.trainers_per_node
    strategies = _strategies(experiment)
    quiet = experiment.replace(
        cluster=Cluster(trainers_per_node=trainers),
        strategy=compute_part(experiment.strategy),
        workload=dataclasses.replace(experiment.workload, profile=None),
    )
    total = len(strategies) + (2 if trainers > 1 else 0)
    tables = []
    communication = None
    with Session(quiet) as session:
        for number, strategy in enumerate(strategies):
            leg = Leg(strategy=_measured_part(strategy), steps=_STEPS, warmup_steps=_WARMUP, profile=True, max_s=_MAX_S)
            tables.append(_table(compute_key(experiment, strategy), session.run_profile(leg)))
            if progress is not None:
                progress(number + 1, total)
        if trainers > 1:
            one, every = (
                session.run(_averaging_leg(strategies[0], changes, tables[0]))
                for changes in ({"fuse_grad_size_in_MB": 0.0}, {"fuse_all_reduce_ops": False})
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


def _strategies(experiment: Experiment) -> list[DistributedStrategy]:
    """The strategy at every thread count that is asked for; synchronised batch norm allows one alone."""
    strategy = experiment.strategy
    counts = {strategy.thread_num} if strategy.sync_batch_norm else {strategy.thread_num, *experiment.tune.thread_num}
    return [strategy.replace(thread_num=count) for count in sorted(counts)]


def _measured_part(strategy: DistributedStrategy) -> DistributedStrategy:
    """The compute part, with the update apart from the backward, so that it can be told from it."""
    build = dataclasses.replace(strategy.build_strategy, enable_backward_optimizer_op_deps=True)
    return compute_part(strategy.replace(build_strategy=build))


def _name(experiment: Experiment) -> str:
    keys = [compute_key(experiment, strategy) for strategy in _strategies(experiment)]
    what = {"method": _METHOD, "tables": keys, "backend": experiment.run.backend, "machine": machine(), "torch": versions()["torch"]}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _averaging_leg(measured: DistributedStrategy, changes: dict[str, Any], table: LayerTable) -> Leg:
    """As many steps as the time allows, with the update of the ``measured`` strategy, whose ``table`` is known."""
    strategy = DistributedStrategy(
        localsgd=True,
        localsgd_configs=LocalSGDConfigs(k_steps=1),
        thread_num=measured.thread_num,
        build_strategy=BuildStrategy(fuse_all_optimizer_ops=measured.build_strategy.fuse_all_optimizer_ops),
        **changes,
    )
    affordable = int(_MAX_S * 1e9 / max(1, table.forward_ns + table.backward_ns + table.update + table.read))
    steps = max(LEAST_STEPS, min(_STEPS, affordable))
    return Leg(strategy=strategy, steps=steps, warmup_steps=max(LEAST_STEPS, min(_WARMUP, steps // 4)))


def _table(key: str, parts: list[dict[str, Any]]) -> LayerTable:
    """One table from all ranks' steps: medians, with the layers' backward from when gradients are final."""
    first = parts[0]
    times = first["layers"]
    forward = np.median(np.concatenate([np.asarray(part["layers"]["forward"]) for part in parts]), axis=0)
    backward, update, read = (round(_median(parts, name)) for name in ("backward", "update", "read"))
    ready = _ready(parts, backward)
    touched = {name: round(median(count for part in parts for count in part["touched"].get(name, ()))) for name in first["touched"]}
    layers: list[Layer] = []
    before = 0
    for name, took in sorted(zip(times["layers"], forward, strict=True), key=lambda item: _last_ready(item[0], ready)):
        end = _last_ready(name, ready)
        layers.append(
            Layer(
                name=name,
                gradients=tuple(
                    Gradient(
                        name=gradient,
                        numel=numel,
                        dtype=dtype,
                        sparse=gradient in touched,
                        touched=touched.get(gradient, 0),
                        ready=Nanoseconds(ready[gradient]),
                    )
                    for gradient, numel, dtype in times["gradients"]
                    if gradient.rpartition(".")[0] == name
                ),
                forward=Nanoseconds(round(took)),
                backward=Nanoseconds(end - before),
                activation_bytes=Bytes(first["activation_bytes"].get(name, 0)),
            )
        )
        before = end
    layers[-1] = dataclasses.replace(layers[-1], backward=Nanoseconds(layers[-1].backward + backward - before))
    return LayerTable(
        key=key,
        layers=tuple(reversed(layers)),
        update=Nanoseconds(update),
        read=Nanoseconds(read),
        buffers_nbytes=Bytes(first["buffers_nbytes"]),
        contention=_contention(parts),
    )


def _median(parts: list[dict[str, Any]], name: str) -> float:
    return float(median(value for part in parts for value in part[name]))


def _ready(parts: list[dict[str, Any]], backward: int) -> dict[str, int]:
    """When each gradient is final; at the backward's end where it did not come."""
    steps = [[backward if time is None else min(time, backward) for time in step] for part in parts for step in part["layers"]["ready"]]
    names = [name for name, _, _ in parts[0]["layers"]["gradients"]]
    return {name: round(time) for name, time in zip(names, np.median(np.asarray(steps), axis=0), strict=True)}


def _contention(parts: list[dict[str, Any]]) -> float:
    """By which factor compute is longer beside traffic; none was measured for one trainer."""
    if not all(part["compute_beside_traffic"] for part in parts):
        return 0.0
    return round(max(0.0, _median(parts, "compute_beside_traffic") / _median(parts, "compute") - 1.0), 4)


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
