from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from fleetbench.experiment import Experiment
from fleetbench.plan.build import Plan, Setting, build_plan
from fleetbench.plan.groups import queue_depth
from fleetbench.plan.layers import Gradient, declared_table
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from resnet50 import resnet50_gradients


def gradients(count: int) -> list[Gradient]:
    """So many gradients of 1 MiB."""
    return [Gradient(name=f"l{index}.weight", numel=2**18, ready=Nanoseconds(index)) for index in range(count)]


def plan(count: int, communicators: int, *, one_in_flight: bool, trainers: int = 4) -> Plan:
    """One bucket for each gradient."""
    strategy = DistributedStrategy(fuse_all_reduce_ops=False, nccl_comm_num=communicators, sync_nccl_allreduce=one_in_flight)
    return build_plan(strategy, gradients(count), Setting(trainers=trainers))


@given(count=st.integers(1, 12), communicators=st.integers(1, 5), one_in_flight=st.booleans())
def test_buckets_go_to_the_communicators_in_turn(count: int, communicators: int, one_in_flight: bool) -> None:
    """Bucket i travels on communicator i mod nccl_comm_num, in the order of buckets."""
    exchange = plan(count, communicators, one_in_flight=one_in_flight).exchange
    assert [operation.bucket for operation in exchange] == list(range(count))
    assert [operation.communicator for operation in exchange] == [bucket % communicators for bucket in range(count)]


def test_one_bucket_is_in_flight_over_all_communicators() -> None:
    """With sync_nccl_allreduce each all-reduce waits for the one before it."""
    assert [operation.after for operation in plan(5, 2, one_in_flight=True).exchange] == [(), (0,), (1,), (2,), (3,)]
    assert plan(5, 2, one_in_flight=True).leaves == (4,)


def test_a_queue_is_as_deep_as_the_backend_lets_it() -> None:
    """Two on gloo, one on NCCL and on whatever else there is; a plan says it, and its digest tells it."""
    assert (queue_depth("gloo"), queue_depth("nccl"), queue_depth("deferred")) == (2, 1, 1)
    plans = [build_plan(DistributedStrategy(), gradients(4), Setting(trainers=4, queue_depth=depth)) for depth in (1, 2)]
    assert [plan.queue_depth for plan in plans] == [1, 2]
    assert plans[0].digest != plans[1].digest
    written = plans[1].to_dict()
    assert Plan.from_dict(written) == plans[1]
    del written["queue_depth"]  # as plans were written before
    assert Plan.from_dict(written) == plans[0]


def test_a_plan_survives_json_and_keeps_its_digest() -> None:
    """``plan.json`` gives the same plan back, on any machine, groups and all."""
    strategy = DistributedStrategy(nccl_comm_num=2, use_hierarchical_allreduce=True, fp16_allreduce=True)
    rows = Gradient(name="embedding.weight", numel=1000, sparse=True, touched=10, ready=Nanoseconds(999))
    setting = Setting(trainers=8, trainers_per_node=4, num_state_slots=2, buffers_nbytes=12)
    original = build_plan(strategy, [*resnet50_gradients(half=True), rows], setting)
    again = Plan.from_dict(json.loads(json.dumps(original.to_dict())))
    assert again == original
    assert again.digest == original.digest
    assert len(original.digest) == 16


def test_a_declared_table_is_ready_layer_by_layer_from_the_back() -> None:
    """Each layer's gradient is ready when its own backward ends; a repeated layer gets an index."""
    layers = [
        {"name": "in", "params": 10, "forward": "1 ms", "backward": "2 ms"},
        {"name": "pool", "params": 0, "forward": "1 us", "backward": "5 us"},
        {"name": "block", "params": 20, "forward": "3 ms", "backward": "4 ms", "repeat": 2},
    ]
    table = declared_table(Experiment.from_dict({"workload": {"model": "layers", "layers": layers, "dtype": "float64"}}).workload)
    assert [layer.name for layer in table.layers] == ["in", "pool", "block0", "block1"]
    assert table.forward_ns == 7_001_000
    assert table.backward_ns == 10_005_000
    assert [(gradient.name, gradient.ready, gradient.nbytes) for gradient in table.by_readiness()] == [
        ("block1.weight", 4_000_000, 160),
        ("block0.weight", 8_000_000, 160),
        ("in.weight", 10_005_000, 80),
    ]
