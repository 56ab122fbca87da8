"""The exchange: which buckets travel where, in which order, and what that sends."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan, Setting, build_plan
from fleetbench.plan.exchange import lay_out
from fleetbench.plan.fusion import Bucket
from fleetbench.plan.layers import Gradient
from fleetbench.plan.operations import COLLECTIVES, Operation, wire_bytes
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy

LEADER = {"use_hierarchical_allreduce": True}
SCATTER = {"use_hierarchical_allreduce": True, "hierarchical_variant": "reduce_scatter"}


def dense(*numels: int, dtype: str = "float32") -> list[Gradient]:
    """One layer a gradient."""
    return [Gradient(name=f"l{index}.w", numel=numel, dtype=dtype, ready=Nanoseconds(index)) for index, numel in enumerate(numels)]


def plan(gradients: list[Gradient], trainers: int = 8, trainers_per_node: int = 4, **fields: Any) -> Plan:
    """One bucket a gradient."""
    strategy = DistributedStrategy(fuse_all_reduce_ops=False, **fields)
    return build_plan(strategy, gradients, Setting(trainers=trainers, trainers_per_node=trainers_per_node))


@pytest.mark.parametrize(("trainers", "inner", "value"), [(8, 3, "3"), (8, 1, "1"), (4, 8, "8")])
def test_a_hierarchy_that_does_not_divide_the_world_is_refused(trainers: int, inner: int, value: str) -> None:
    """The error names the field and what would do."""
    with pytest.raises(ConfigError) as error:
        plan(dense(10), trainers, hierarchical_inner_ranks=inner, **LEADER)
    assert error.value.where == "strategy.hierarchical_inner_ranks"
    assert error.value.value == value
    assert f"divides the {trainers} trainers" in error.value.hint


def test_the_leaders_chain() -> None:
    """Reduce to the node's leader, all-reduce among leaders, broadcast: each of the whole bucket, each after the one before."""
    found = plan(dense(10, 3), **LEADER)
    assert [(op.id, op.bucket, op.kind, op.group, op.nbytes, op.after) for op in found.exchange] == [
        (0, 0, "reduce", "inner", 40, ()),
        (1, 0, "all_reduce", "leaders", 40, (0,)),
        (2, 0, "broadcast", "inner", 40, (1,)),
        (3, 1, "reduce", "inner", 12, (2,)),
        (4, 1, "all_reduce", "leaders", 12, (3,)),
        (5, 1, "broadcast", "inner", 12, (4,)),
    ]


def test_the_reduce_scatter_chain() -> None:
    """Parts of ceil(10 / 4) = 3 and ceil(3 / 4) = 1 numbers, so the nodes see 12 and 4; between nodes a part travels."""
    found = plan(dense(10, 3), **SCATTER)
    assert [(op.id, op.bucket, op.kind, op.group, op.nbytes, op.after) for op in found.exchange] == [
        (0, 0, "reduce_scatter", "inner", 48, ()),
        (1, 0, "all_reduce", "outer", 12, (0,)),
        (2, 0, "all_gather", "inner", 48, (1,)),
        (3, 1, "reduce_scatter", "inner", 16, (2,)),
        (4, 1, "all_reduce", "outer", 4, (3,)),
        (5, 1, "all_gather", "inner", 16, (4,)),
    ]


def bucket(number: int, kind: str) -> Bucket:
    """Of 8 numbers: ``float32``, as small as a wire of FP16, or a sparse gradient's rows."""
    return Bucket(id=number, gradients=(f"g{number}",), numel=8, dtype="float16" if kind == "small" else "float32", sparse=kind == "rows")


@pytest.mark.parametrize(
    ("kinds", "fp16", "after"),
    [
        (["plain", "plain", "plain"], False, [(), (), ()]),
        (["plain", "plain", "rows", "plain", "plain"], False, [(), (), (0, 1), (2,), (2,)]),
        (["rows", "rows", "plain", "rows"], False, [(), (0,), (1,), (2,)]),
        (["plain", "plain", "plain"], True, [(), (0,), (1,)]),  # each is cast before it and after it
        (["small", "small", "small"], True, [(), (), ()]),  # as small already
    ],
)
def test_what_is_no_plain_all_reduce_is_alone_on_its_communicator(kinds: list[str], fp16: bool, after: list[tuple[int, ...]]) -> None:
    """Rows and casts wait for all before them, and all after wait for them; the others go as they come."""
    strategy = DistributedStrategy(sync_nccl_allreduce=False, fp16_allreduce=fp16)
    assert [op.after for op in lay_out([bucket(number, kind) for number, kind in enumerate(kinds)], strategy, 4, 0)] == after


def sent_by_all(found: Plan) -> dict[str, int]:
    """Bytes that all ranks together send in one exchange, by group."""
    sent: dict[str, int] = {}
    for op in found.exchange:
        assert op.kind in COLLECTIVES
        for part in found.parts[op.group]:
            sent[op.group] = sent.get(op.group, 0) + len(part) * wire_bytes(op, len(part))
    return sent


@given(inner=st.integers(2, 5), nodes=st.integers(2, 5), units=st.integers(1, 1000))
def test_what_a_hierarchy_sends(inner: int, nodes: int, units: int) -> None:
    """Inside a node 2(I-1)S and between nodes 2(N-1)S, in both variants; a flat ring's 2(P-1)S is the sum of both, over the nodes."""
    numel = inner * nodes * units
    size = 4 * numel
    setting: dict[str, Any] = {"trainers": inner * nodes, "trainers_per_node": inner}
    inside, between = nodes * 2 * (inner - 1) * size, 2 * (nodes - 1) * size
    assert sent_by_all(plan(dense(numel), **setting, **LEADER)) == {"inner": inside, "leaders": between}
    assert sent_by_all(plan(dense(numel), **setting, **SCATTER)) == {"inner": inside, "outer": between}
    assert sent_by_all(plan(dense(numel), **setting)) == {"world": inside + between}


@pytest.mark.parametrize(
    ("fields", "dtype", "wire", "size"),
    [
        ({}, "float32", "float32", 4),
        ({}, "float64", "float64", 8),
        ({"fp16_allreduce": True}, "float32", "float16", 2),
        ({"bf16_allreduce": True}, "float32", "bfloat16", 2),
        ({"fp16_allreduce": True}, "float64", "float16", 2),
        ({"fp16_allreduce": True}, "bfloat16", "bfloat16", 2),
        ({"bf16_allreduce": True}, "float16", "float16", 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("hierarchy", [{}, LEADER, SCATTER], ids=["flat", "leader", "reduce_scatter"])
def test_the_type_on_the_wire(fields: dict[str, Any], dtype: str, wire: str, size: int, hierarchy: dict[str, Any]) -> None:
    """Half as wide where asked, and never wider or as wide but other; in every operation of a chain."""
    found = plan(dense(8, dtype=dtype), **fields, **hierarchy)
    assert {operation.wire_dtype for operation in found.exchange} == {wire}
    shares = {"outer": 2} if hierarchy == SCATTER else {}
    assert all(operation.nbytes == shares.get(operation.group, 8) * size for operation in found.exchange)


@pytest.mark.parametrize(
    ("kind", "payload", "nbytes", "ranks", "sent"),
    [
        ("all_reduce", "gradient", 1000, 2, 1000),
        ("all_reduce", "gradient", 1000, 4, 1500),
        ("all_reduce", "gradient", 1000, 1, 0),
        ("all_reduce", "gradient", 10, 3, 13),
        ("reduce", "gradient", 1000, 4, 750),
        ("broadcast", "gradient", 1000, 4, 750),
        ("reduce_scatter", "gradient", 1000, 4, 750),
        ("all_gather", "gradient", 1000, 4, 750),
        ("all_gather", "rows", 1000, 4, 3000),
        ("update", None, 1000, 4, 0),
        ("merge", None, 1000, 4, 0),
    ],
)
def test_what_a_rank_sends(kind: Any, payload: Any, nbytes: int, ranks: int, sent: int) -> None:
    """2((P-1)/P)S in a ring, half of it by its halves; a reduce and a broadcast pass S on P - 1 times; rows reach P - 1 others."""
    assert wire_bytes(Operation(id=0, kind=kind, payload=payload, nbytes=nbytes), ranks) == sent
