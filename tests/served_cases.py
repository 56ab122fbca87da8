"""Trainings with parameter servers that virtual trainers and real ones share, and the order of a real job as virtual ones read it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sim_cases import with_profile

from fleetbench.experiment import Experiment
from fleetbench.plan.events import BackwardEnd, StepBegin
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.plan.replay import Recording
from fleetbench.profile import Profile, compute_key
from fleetbench.quantities import Nanoseconds
from fleetbench.workloads.models.registry import build_model
from fleetbench.workloads.training import sparse_weights
from sim.servers.actor import Act, Order, act_of

DIGITS: dict[str, Any] = {"model": "digits_mlp", "model_options": {"hidden": 12}, "batch_size": 8, "lr": 0.05}
CLICKS: dict[str, Any] = {
    "model": "wide_deep",
    "model_options": {"rows": 150, "dim": 2, "hidden": 8, "depth": 1},
    "data": "synthetic",
    "data_options": {"samples": 2000},
    "batch_size": 8,
}
PAIRS: dict[str, Any] = {
    "model": "word2vec",
    "model_options": {"vocab": 40, "dim": 4},
    "data": "synthetic",
    "data_options": {"samples": 1000, "held_out": 200},
    "batch_size": 8,
    "lr": 1.0,
}
ASYNCHRONOUS: dict[str, Any] = {"a_sync": True, "a_sync_configs": {"k_steps": 0}}
SYNCHRONOUS: dict[str, Any] = {"a_sync": False}


def geo_sgd(k_steps: int) -> dict[str, Any]:
    """GeoSGD that exchanges every ``k_steps`` steps."""
    return {"a_sync": True, "a_sync_configs": {"k_steps": k_steps, "send_wait_times": 1000}}


def merging(count: int) -> dict[str, Any]:
    """Asynchronous, with sums of ``count`` gradients."""
    return {"a_sync": True, "a_sync_configs": {"k_steps": 0, "max_merge_var_num": count, "send_wait_times": 1000}}


def served(workload: dict[str, Any], strategy: dict[str, Any], **cluster: Any) -> Experiment:
    """Three trainers and two servers in float64; each step computes 300 us, give or take, and a profile knows it."""
    experiment = Experiment.from_dict(
        {
            "workload": {"dtype": "float64", "steps": 30, "eval_every": 5, **workload},
            "cluster": {
                "nodes": 3,
                "servers": 2,
                "inter": {"bandwidth": "100 Mbit/s", "latency": "20 us"},
                "stragglers": [{"kind": "jitter", "mean": 0.3}],
                **cluster,
            },
            "strategy": {"mode": "ps", **strategy},
            "run": {"warmup_steps": 0, "seed": 3},
        }
    )
    model = build_model(experiment.workload.model, experiment.workload.model_options, "float64", 0)
    sparse = sparse_weights(model)
    gradients = tuple(
        Gradient(name=name, numel=value.numel(), dtype="float64", sparse=name in sparse, ready=Nanoseconds(200_000))
        for name, value in model.named_parameters()
    )
    layer = Layer(name="all", gradients=gradients, forward=Nanoseconds(100_000), backward=Nanoseconds(200_000))
    table = LayerTable(key=compute_key(experiment), layers=(layer,), update=Nanoseconds(20_000))
    return with_profile(experiment, Profile(machine="by hand", created="2026-01-01", tables=(table,)))


def order_of(recordings: Iterable[Recording]) -> Order:
    """What all roles of a job on one clock did, by the time at which each was decided.

    A step's forward comes after its begin, or after the last rows that it looked up.
    """
    found: list[tuple[int, list[Act]]] = []
    for one in recordings:
        before_forward: list[Act] = []
        for now_ns, event, operations in one.log:
            acts = [act for operation in operations if (act := act_of(one.role, one.rank, operation)) is not None]
            if isinstance(event, BackwardEnd):
                before_forward.append(Act("trainer", one.rank, "forward"))
            found.append((now_ns, acts))
            if isinstance(event, StepBegin) or any(operation.kind == "install" for operation in operations):
                before_forward = acts
    order = Order()
    for _, acts in sorted(found, key=lambda entry: entry[0]):
        for act in acts:
            order.add(act)
    return order
