from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.plan.fusion import Bucket, Cost, fuse
from fleetbench.plan.layers import Gradient
from fleetbench.quantities import MIB, Nanoseconds
from fleetbench.strategy import DistributedStrategy
from resnet50 import resnet50_gradients

DTYPES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@st.composite
def gradient_lists(draw: st.DrawFn) -> list[Gradient]:
    """Gradients in any order of readiness: layers interleaved, sizes from nothing to several MiB, some sparse."""
    names = draw(
        st.lists(
            st.tuples(st.sampled_from(["a", "a.b", "c", "d.e.f", "g"]), st.sampled_from(["weight", "bias", "w2", "w3", "w4"])),
            unique=True,
            max_size=20,
        )
    )
    return [
        Gradient(
            name=f"{layer}.{part}",
            numel=draw(st.integers(0, MIB)),
            dtype=draw(st.sampled_from(sorted(DTYPES))),
            sparse=draw(st.integers(0, 5)) == 0,
            ready=Nanoseconds(index),
        )
        for index, (layer, part) in enumerate(names)
    ]


BY_CAPS = st.builds(
    DistributedStrategy,
    fuse_grad_size_in_MB=st.sampled_from([0, 0.25, 1, 2, 8]),
    fuse_grad_count=st.sampled_from([0, 1, 2, 3, 5, 50]),
)
BY_NUMBER = st.builds(
    DistributedStrategy,
    fusion=st.just("by_number"),
    fuse_grad_size_in_num=st.integers(1, 6),
    last_comm_group_size_MB=st.sampled_from([0, 1, 4]),
)
AS_DDP = st.builds(
    DistributedStrategy,
    fusion=st.just("ddp"),
    fuse_grad_size_in_MB=st.sampled_from([0, 0.25, 1, 2, 8]),
    first_bucket_size_in_MB=st.sampled_from([0, 0.5, 1]),
)
STRATEGIES = BY_CAPS | BY_CAPS | BY_NUMBER | AS_DDP | st.just(DistributedStrategy(fuse_all_reduce_ops=False))


def nbytes(gradients: list[Gradient]) -> int:
    """Bytes of some gradients, by hand."""
    return sum(gradient.numel * DTYPES[gradient.dtype] for gradient in gradients)


@given(gradients=gradient_lists(), strategy=STRATEGIES)
def test_every_gradient_is_in_exactly_one_bucket(gradients: list[Gradient], strategy: DistributedStrategy) -> None:
    """Nothing is lost and nothing travels twice; sizes and ids are those of the contents."""
    buckets = fuse(gradients, strategy)
    assert sorted(name for bucket in buckets for name in bucket.gradients) == sorted(gradient.name for gradient in gradients)
    assert [bucket.id for bucket in buckets] == list(range(len(buckets)))
    by_name = {gradient.name: gradient for gradient in gradients}
    for bucket in buckets:
        members = [by_name[name] for name in bucket.gradients]
        assert bucket.numel == sum(member.numel for member in members)
        assert bucket.nbytes == nbytes(members)
        assert {(member.dtype, member.sparse) for member in members} == {(bucket.dtype, bucket.sparse)}


def before_types(buckets: tuple[Bucket, ...], gradients: list[Gradient], strategy: DistributedStrategy) -> list[list[Gradient]]:
    """The groups that the buckets came from: the same gradients, all of one type and so never split."""
    plain = [
        Gradient(name=gradient.name, numel=gradient.numel * DTYPES[gradient.dtype], dtype="float16", ready=gradient.ready)
        for gradient in gradients
    ]
    halved = [Gradient(name=g.name, numel=g.numel // 2, dtype="float16", ready=g.ready) for g in plain]
    by_name = {gradient.name: gradient for gradient in gradients}
    groups = [[by_name[name] for name in bucket.gradients] for bucket in fuse(halved, strategy)]
    for bucket in buckets:
        assert any(set(bucket.gradients) <= {gradient.name for gradient in group} for group in groups)
    return groups


def layers_of(group: list[Gradient]) -> list[str]:
    """Owning modules in order of first appearance."""
    return list(dict.fromkeys(gradient.name.rpartition(".")[0] for gradient in group))


@given(gradients=gradient_lists().filter(bool), strategy=AS_DDP)
def test_buckets_as_ddps_are_those_that_torch_makes(gradients: list[Gradient], strategy: DistributedStrategy) -> None:
    """Torch's own function, asked as its Reducer asks it when it rebuilds its buckets, groups the gradients alike."""
    tensors = [torch.empty(gradient.numel, dtype=getattr(torch, gradient.dtype), device="meta") for gradient in gradients]
    cap = round(strategy.fuse_grad_size_in_MB * MIB) or 1 << 50
    limits = [round(strategy.first_bucket_size_in_MB * MIB) or cap, cap]
    sparse, indices = [gradient.sparse for gradient in gradients], [*range(len(gradients))]
    groups, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, limits, sparse, indices)
    theirs = {tuple(gradients[index].name for index in group) for group in groups}
    assert {bucket.gradients for bucket in fuse(gradients, strategy)} == theirs


CAPS = {"fuse_grad_size_in_MB": st.sampled_from([0.25, 1, 2, 8]), "fuse_grad_count": st.sampled_from([0, 1, 2, 3, 5, 50])}


@given(gradients=gradient_lists(), strategy=st.builds(DistributedStrategy, **CAPS))
def test_fleets_groups_keep_layers_whole_and_in_order_and_overshoot_by_one_layer(
    gradients: list[Gradient], strategy: DistributedStrategy
) -> None:
    """Layers in order of first appearance, each whole; without its last layer a group is under both caps, with it a closed one is not."""
    dense = [gradient for gradient in gradients if not gradient.sparse]
    everywhere = [bucket for bucket in fuse(gradients, strategy) if not bucket.sparse]
    groups = before_types(tuple(everywhere), dense, strategy)
    groups.sort(key=lambda group: layers_of(dense).index(layers_of(group)[0]))
    assert [layer for group in groups for layer in layers_of(group)] == layers_of(dense)
    count_cap = strategy.fuse_grad_count if strategy.fuse_grad_count > 1 else len(dense) + 1
    for index, group in enumerate(groups):
        last = layers_of(group)[-1]
        rest = [gradient for gradient in group if gradient.name.rpartition(".")[0] != last]
        assert len(rest) <= count_cap
        assert nbytes(rest) < strategy.fuse_grad_size_in_MB * MIB
        if index < len(groups) - 1:
            assert len(group) > count_cap or nbytes(group) >= strategy.fuse_grad_size_in_MB * MIB


@given(gradients=gradient_lists(), number=st.integers(1, 6), last=st.sampled_from([0, 1, 4]))
def test_by_number_counts_gradients_of_a_type_and_keeps_a_small_last_bucket(gradients: list[Gradient], number: int, last: int) -> None:
    """So many gradients a bucket and type, full but for each type's last; the final ones, up to so many MiB, apart."""
    dense = [gradient for gradient in gradients if not gradient.sparse]
    strategy = DistributedStrategy(fusion="by_number", fuse_grad_size_in_num=number, last_comm_group_size_MB=last)
    buckets = [bucket for bucket in fuse(gradients, strategy) if not bucket.sparse]
    tail = next(index for index in range(len(dense) + 1) if nbytes(dense[index:]) <= last * MIB)
    kept = {gradient.name for gradient in dense[tail:]}
    final = [bucket for bucket in buckets if set(bucket.gradients) & kept]
    assert {name for bucket in final for name in bucket.gradients} == kept
    order = [gradient.name for gradient in dense]
    assert all(list(bucket.gradients) == sorted(bucket.gradients, key=order.index) for bucket in buckets)
    for dtype in DTYPES:
        of_type = [gradient.name for gradient in dense[:tail] if gradient.dtype == dtype]
        expected = [tuple(of_type[start : start + number]) for start in range(0, len(of_type), number)]
        assert [bucket.gradients for bucket in buckets if bucket.dtype == dtype and bucket not in final] == expected


def gradients_of(*sizes_mib: float, parts: int = 1) -> list[Gradient]:
    """One layer for each size, of so many gradients of that size."""
    return [
        Gradient(name=f"l{layer}.p{part}", numel=int(size * MIB / 4), ready=Nanoseconds(layer))
        for layer, size in enumerate(sizes_mib)
        for part in range(parts)
    ]


@pytest.mark.parametrize(
    ("fields", "sizes", "parts", "expected"),
    [
        ({"fuse_grad_size_in_MB": 4}, (1, 1, 1, 1, 1), 1, [4, 1]),  # closed by exactly 4 MiB
        ({"fuse_grad_size_in_MB": 4}, (1, 2, 8, 1), 1, [3, 1]),  # overshot by one layer
        ({"fuse_grad_size_in_MB": 100, "fuse_grad_count": 3}, (1,) * 5, 1, [4, 1]),  # closed when it holds more than 3
        ({"fuse_grad_size_in_MB": 100, "fuse_grad_count": 3}, (1,) * 3, 2, [4, 2]),  # 2 + 2 > 3
        ({"fuse_grad_size_in_MB": 100, "fuse_grad_count": 1}, (1,) * 5, 1, [5]),  # 1 is no cap
        ({"fuse_grad_size_in_MB": 100, "fuse_grad_count": 0}, (1,) * 5, 1, [5]),  # nor is 0
        ({"fuse_grad_size_in_MB": 0, "fuse_grad_count": 2}, (1,) * 5, 1, [5]),
        ({"fusion": "by_number", "fuse_grad_size_in_num": 2, "last_comm_group_size_MB": 1}, (1,) * 6, 1, [2, 2, 1, 1]),
    ],
)
def test_caps_by_hand(fields: dict[str, Any], sizes: tuple[float, ...], parts: int, expected: list[int]) -> None:
    """Small cases worked out on paper: gradients in each bucket."""
    buckets = fuse(gradients_of(*sizes, parts=parts), DistributedStrategy(**fields))
    assert [len(bucket.gradients) for bucket in buckets] == expected


@pytest.mark.parametrize(("megabytes", "half", "published"), [(32, False, 5), (16, False, 6), (32, True, 8)])
def test_resnet50_fuses_into_the_published_numbers_of_buckets(megabytes: int, half: bool, published: int) -> None:
    """Fleet's logs: 5 buckets at 32 MB, 6 at 16 MB, 8 at 32 MB with convolutions and classifier in FP16."""
    strategy = DistributedStrategy(fuse_grad_size_in_MB=megabytes, fuse_grad_count=50)
    assert len(fuse(resnet50_gradients(half=half), strategy)) == published


def spread(*milliseconds: float, numel: int = 250_000, dtype: str = "float32") -> list[Gradient]:
    """Layers of 1 MB in FP32, ready at these times."""
    return [
        Gradient(name=f"l{index}.weight", numel=numel, dtype=dtype, ready=Nanoseconds(int(at * 1e6)))
        for index, at in enumerate(milliseconds)
    ]


MERGED = DistributedStrategy(fusion="merged_gradient")
ONE_AND_ONE = Cost(latency_ns=1e6, ns_per_byte=1.0)
"""1 ms, and 1 ms a megabyte."""


@pytest.mark.parametrize(
    ("ready_ms", "expected"),
    [
        ((0, 5, 10), [1, 1, 1]),  # each is sent long before the next is ready
        ((0, 0.5, 5), [2, 1]),  # the second comes within the first's latency
        ((0, 1.5, 2.5, 9), [1, 2, 1]),  # the second is ready at 1.5 and waits for the wire until 2; the third is there before 2 + 1
        ((0, 0, 0, 0), [4]),
    ],
)
def test_merged_gradient_by_hand(ready_ms: tuple[float, ...], expected: list[int]) -> None:
    """Gradients of 1 MB, at 1 ms and 1 ms a megabyte: how many each bucket holds."""
    buckets = fuse(spread(*ready_ms), MERGED, ONE_AND_ONE)
    assert [len(bucket.gradients) for bucket in buckets] == expected
