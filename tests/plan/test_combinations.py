"""Every pair of switches is planned and drives, or is refused with a reason; the table in the docs says which."""

from __future__ import annotations

import dataclasses
import itertools
import re
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetbench.errors import ConfigError
from fleetbench.exclusions import exclusions as rows_of
from fleetbench.plan.build import Plan, Setting, build_plan
from fleetbench.plan.events import DataEnd, EpochEnd, Flush
from fleetbench.plan.fusion import Cost
from fleetbench.plan.layers import Gradient
from fleetbench.plan.operations import COLLECTIVES, Operations
from fleetbench.plan.replay import Decider
from fleetbench.plan.training import PLANNED, family
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import refuse_unexecuted
from plan.contract import awaited, run_step

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [
    DOCS / f"{name}.md"
    for name in ("strategies", "exchange", "local_sgd", "elastic", "outer_optimizer", "gradient_merge", "compute", "sharding")
]
"""The pages of collective strategies."""
Fields = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Driven:
    """What came of a strategy."""

    plan: Plan
    operations: Operations
    observes: frozenset[str]


Evidence = Callable[[Driven], bool]


def _build(**fields: Any) -> Fields:
    return {"build_strategy": fields}


def _local(**configs: Any) -> Fields:
    return {"localsgd": True, "localsgd_configs": {"k_steps": 2, **configs}}


def _adaptive(**configs: Any) -> Fields:
    return {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 2, **configs}}


def _merge(**configs: Any) -> Fields:
    return {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2, **configs}}


def _payload(name: str) -> Evidence:
    return lambda run: any(operation.payload == name for operation in run.operations)


def _merges(run: Driven) -> bool:
    """Gradients are added beside the plan, or, of a sharded model, as they are scattered in steps that skip the update."""
    kinds = {operation.kind for operation in run.operations}
    return {"accumulate", "release"} <= kinds or (bool(run.plan.blocks) and {"skip", "update"} <= kinds)


def _nothing_of_the_plan(_: Driven) -> bool:
    return True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Switch:
    """One row of the table."""

    variants: tuple[Fields, ...]
    """Ways to switch it on; the table has one answer for all of them."""
    called: tuple[str, ...]
    """What a refusal calls it."""
    shows: Evidence = _nothing_of_the_plan
    """Whether a run's operations bear its mark."""
    is_dense: bool = False
    """Sparse gradients are refused with it."""
    local_hides: bool = False
    """Local SGD, which averages parameters, has no use for it, and it does no harm there."""


SWITCHES: dict[str, Switch] = {
    "hierarchy": Switch(
        variants=tuple({"use_hierarchical_allreduce": True, "hierarchical_variant": name} for name in ("leader", "reduce_scatter")),
        called=("use_hierarchical_allreduce",),
        shows=lambda run: "inner" in run.plan.parts and any(operation.group == "inner" for operation in run.operations),
    ),
    "free communicators": Switch(
        variants=({"nccl_comm_num": 2, "sync_nccl_allreduce": False},),
        called=("nccl_comm_num", "sync_nccl_allreduce"),
        shows=lambda run: (
            bool(run.plan.fragments) or (len(run.plan.leaves) >= 2 and {operation.communicator for operation in run.operations} >= {0, 1})
        ),
    ),
    "fusion by cost": Switch(
        variants=({"fusion": "merged_gradient"}, {"fusion": "optimal"}),
        called=("fusion",),
        shows=lambda run: [len(bucket.gradients) for bucket in run.plan.buckets if not bucket.sparse] in ([1, 3], [1, 1, 2]),
    ),
    "16-bit wire": Switch(
        variants=({"fp16_allreduce": True}, {"bf16_allreduce": True}),
        called=("16-bit wire",),
        shows=lambda run: any(operation.wire_dtype in ("float16", "bfloat16") for operation in run.operations),
    ),
    "unused parameters": Switch(
        variants=({"find_unused_parameters": True},), called=("find_unused_parameters",), shows=_payload("unused"), local_hides=True
    ),
    "update by bucket": Switch(
        variants=(_build(enable_backward_optimizer_op_deps=False),),
        called=("enable_backward_optimizer_op_deps",),
        shows=lambda run: {0, 1} <= {operation.bucket for operation in run.operations if operation.kind == "update"},
    ),
    "Local SGD": Switch(
        variants=(_local(),),
        called=("Local SGD", "localsgd"),
        shows=_payload("delta"),
    ),
    "another schedule": Switch(
        variants=(_local(schedule="document", warmup_epochs=1), _local(schedule="torch")),
        called=("Local SGD", "localsgd", "schedule"),
        shows=_payload("delta"),
    ),
    "momentum reset": Switch(
        variants=(_local(momentum="reset"),),
        called=("Local SGD", "localsgd", "momentum"),
        shows=lambda run: any(operation.kind == "reset" and operation.payload == "state" for operation in run.operations),
    ),
    "Adam's state averaged": Switch(
        variants=(_local(optimizer_state="average"),),
        called=("Local SGD", "localsgd", "optimizer_state"),
        shows=_payload("state"),
    ),
    "statistics averaged": Switch(
        variants=(_local(buffers="average"),),
        called=("Local SGD", "localsgd", "buffers"),
        shows=lambda run: any((operation.kind, operation.payload) == ("all_reduce", "buffers") for operation in run.operations),
    ),
    "outer optimizer": Switch(
        variants=(_local(outer_lr=0.7, outer_momentum=0.9), _local(outer_momentum=0.5, outer_nesterov=False)),
        called=("Local SGD", "localsgd", "outer_lr"),
        shows=lambda run: any(operation.kind == "outer" for operation in run.operations),
    ),
    "fragments": Switch(
        variants=(_local(fragments=2), _local(overlap_steps=1), _local(mixing=0.5)),
        called=("Local SGD", "localsgd", "fragments", "outer_lr"),
        shows=lambda run: any(operation.kind == "merge" and operation.fragment is not None for operation in run.operations),
    ),
    "INT8 wire": Switch(
        variants=(_local(outer_lr=0.7, outer_wire="int8"),),
        called=("Local SGD", "localsgd", "outer_wire", "outer_lr"),
        shows=lambda run: any(operation.wire_dtype == "int8" for operation in run.operations),
    ),
    "adaptive Local SGD": Switch(
        variants=(*(_adaptive(variant=name) for name in ("fleet", "paper", "document", "qsr")), _adaptive(momentum="average")),
        called=("Local SGD", "adaptive_localsgd"),
        shows=lambda run: "lr" in run.observes and _payload("delta")(run),
    ),
    "gradient merge": Switch(
        variants=(_merge(), _merge(avg=False), _merge(remainder="drop"), _merge(batch_norm_per="update")),
        called=("gradient_merge",),
        shows=_merges,
    ),
    "its remainder flushed": Switch(
        variants=(_merge(remainder="flush"),),
        called=("remainder",),
        shows=_merges,
    ),
    "FP16": Switch(
        variants=tuple({"amp": True, "amp_configs": {"dtype": "fp16", "use_dynamic_loss_scaling": dynamic}} for dynamic in (True, False)),
        called=("amp",),
        shows=lambda run: "found_inf" in run.observes and any(operation.kind == "skip" for operation in run.operations),
    ),
    "BF16": Switch(variants=({"amp": True, "amp_configs": {"dtype": "bf16"}},), called=("amp",)),
    "recompute": Switch(variants=({"recompute": True, "recompute_configs": {"checkpoints": ["l0"]}},), called=("recompute",)),
    "SyncBatchNorm": Switch(variants=({"sync_batch_norm": True},), called=("sync_batch_norm",)),
    "fused optimizer": Switch(variants=(_build(fuse_all_optimizer_ops=True),), called=("fuse_all_optimizer_ops",)),
    "compile": Switch(
        variants=(
            _build(fuse_elewise_add_act_ops=True),
            _build(fuse_bn_act_ops=True),
        ),
        called=("fuse_elewise_add_act_ops", "fuse_bn_act_ops"),
    ),
    "several threads": Switch(variants=({"thread_num": 2},), called=("thread_num",)),
    "sequential execution": Switch(variants=(_build(enable_sequential_execution=True),), called=("enable_sequential_execution",)),
    "sharding": Switch(
        variants=tuple({"sharding": True, "sharding_configs": {"stage": stage, "sharding_degree": 2}} for stage in (1, 2, 3)),
        called=("sharding",),
        shows=lambda run: (
            {"all_gather", "reduce_scatter"} <= {operation.kind for operation in run.operations if operation.group == "shard"}
        ),
        is_dense=True,
    ),
    "workers of trainers": Switch(
        variants=(_local(worker_trainers=2),),
        called=("Local SGD", "localsgd", "worker_trainers"),
        shows=lambda run: (
            {(operation.kind, operation.group, operation.payload) for operation in run.operations}
            >= {("all_reduce", "inner", "gradient"), ("all_reduce", "outer", "delta"), ("all_gather", "inner", "delta")}
        ),
        is_dense=True,
    ),
}
ONE_FIELD = "-"
LETTERS = (*string.ascii_letters, *(f"a{letter}" for letter in string.ascii_lowercase))
"""In the table: two values of one field, which cannot meet."""


def joined(first: Fields, second: Fields) -> Fields | None:
    """Both, tables within tables; none where they want two values of one field."""
    result = dict(first)
    for name, value in second.items():
        if name not in result or result[name] == value:
            result[name] = value
        elif isinstance(value, dict):
            inner = joined(result[name], value)
            if inner is None:
                return None
            result[name] = inner
        else:
            return None
    return result


def gradients(*, sparse: bool) -> list[Gradient]:
    """Four dense gradients, one early and three together, and perhaps an embedding's."""
    dense = [Gradient(name=f"l{index}.weight", numel=2**17, ready=Nanoseconds(10**6 * (index > 0))) for index in range(4)]
    return [*dense, Gradient(name="t.weight", numel=1000, sparse=True, touched=10, ready=Nanoseconds(10**7))] if sparse else dense


def overflowing(name: str, step: int) -> float:
    """An overflow at steps 3 and 4, a constant learning rate, and a loss that falls."""
    return {"found_inf": float(step in (3, 4)), "lr": 0.01, "loss": 2.0 - step / 20}[name]


def driven(strategy: DistributedStrategy, *, sparse: bool = False, nodes_of: int = 2) -> Driven:
    """Plan, and run ten steps, two epochs' ends, a reading and the end of training, held to what no executor can do without."""
    refuse_unexecuted(strategy, "strategy", PLANNED, "an executor")
    capped = strategy.replace(fuse_grad_size_in_MB=1) if strategy.fusion == "fleet" and not strategy.sharding else strategy
    cost = Cost(latency_ns=10.0, ns_per_byte=0.1)
    setting = Setting(trainers=2 * nodes_of, trainers_per_node=nodes_of, cost=cost, num_state_slots=1, buffers_nbytes=8)
    plan = build_plan(capped, gradients(sparse=sparse), setting)
    decided = family(strategy, plan)
    decider = Decider.start(decided, 0, first_step=0)
    done: list[Operations] = []
    for step in range(10):
        done.append(tuple(operation for operations in run_step(decider, step, overflowing) for operation in operations))
        if step in (3, 7):
            done.append(decider.on(0, EpochEnd()))
        if step == 6:
            done.append(decider.on(0, Flush()))
    done.append(decider.on(0, DataEnd()))
    whole = [tuple(operation for operations in done for operation in operations)]
    for operations in whole if plan.fragments else done:  # a fragment's exchange goes on over steps
        assert {operation.id for operation in operations if operation.kind in COLLECTIVES} <= awaited(operations)
    everything = tuple(operation for operations in done for operation in operations)
    ids = [operation.id for operation in everything]
    assert ids == sorted(set(ids))
    assert any(operation.kind == "update" for operation in everything)
    return Driven(plan, everything, decided.observes)


def refusal(fields: Fields) -> str | None:
    """What ``DistributedStrategy`` says of some fields; none where it takes them."""
    try:
        DistributedStrategy().replace(**fields)
    except ConfigError as error:
        return str(error)
    return None


def exclusions() -> list[tuple[str, str, str]]:
    """All combinations that ``DistributedStrategy`` refuses: two names and the reason."""
    found = [(one, other, reason) for _, one, other, reason in rows_of(DistributedStrategy())]
    assert len(found) <= len(LETTERS), "the docs letter them"
    return found


def answer(first: str, second: str) -> str:
    """One cell of the table: yes, the letter of a reason, or a dash; the same for all variants."""
    found = set()
    for a, b in itertools.product(SWITCHES[first].variants, SWITCHES[second].variants):
        fields = joined(a, b)
        if fields is None:
            continue
        message = refusal(fields)
        letters = [
            letter
            for letter, (one, other, reason) in zip(LETTERS, exclusions(), strict=False)
            if message is not None and f"{one} and {other} exclude each other: {reason}" in message
        ]
        assert len(letters) == (message is not None), message
        found.add(letters[0] if letters else "yes")
    assert len(found) <= 1, (first, second, found)
    return found.pop() if found else ONE_FIELD


def table() -> str:
    """The docs' matrix, as the code has it."""
    names = list(SWITCHES)
    lines = ["| | " + " | ".join(str(number) for number in range(1, len(names))) + " |", "|---" * len(names) + "|"]
    for row, name in enumerate(names):
        cells = [answer(name, other) for other in names[:row]] + [""] * (len(names) - 1 - row)
        lines.append(f"| {row + 1} {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reasons() -> str:
    """The docs' list of refusals, as the code has it."""
    return "\n".join(
        f"| {letter} | {one} and {other} | {reason} |" for letter, (one, other, reason) in zip(LETTERS, exclusions(), strict=False)
    )


PAIRS = list(itertools.combinations(SWITCHES, 2))


@pytest.mark.parametrize("name", SWITCHES)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_every_switch_is_planned_alone(name: str, sparse: bool) -> None:
    """Each way to switch it on gives operations that bear its mark, also beside an embedding; without it none do."""
    switch = SWITCHES[name]
    for fields in switch.variants:
        if sparse and switch.is_dense:
            with pytest.raises(ConfigError, match=r"parameter t\.weight: has a sparse gradient"):
                driven(DistributedStrategy().replace(**fields), sparse=True)
            continue
        assert switch.shows(driven(DistributedStrategy().replace(**fields), sparse=sparse))
    if switch.shows is not _nothing_of_the_plan:
        assert not switch.shows(driven(DistributedStrategy(), sparse=sparse))


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_every_pair_is_planned_or_refused(pair: tuple[str, str]) -> None:
    """A pair that is taken is planned, drives, and bears the marks of both; one that is not is refused by both names, with a reason."""
    first, second = (SWITCHES[name] for name in pair)
    for a, b in itertools.product(first.variants, second.variants):
        fields = joined(a, b)
        if fields is None:
            continue
        message = refusal(fields)
        if message is not None:
            assert all(any(name in message for name in switch.called) for switch in (first, second)), message
            assert re.search(r"exclude each other: \w+ .*\nHINT: keep one of them", message)
            continue
        strategy = DistributedStrategy().replace(**fields)
        run = driven(strategy)
        for switch in (first, second):
            assert switch.shows(run) or (switch.local_hides and strategy.is_local)


def test_what_excludes_itself_within_one_switch() -> None:
    """Two wires, two reasons to meet, two fates of momentum."""
    for fields, names in (
        ({"fp16_allreduce": True, "bf16_allreduce": True}, ("fp16_allreduce", "bf16_allreduce")),
        (_local() | _adaptive(), ("localsgd", "adaptive_localsgd")),
        (_local(momentum="reset", optimizer_state="average"), ("momentum", "optimizer_state")),
        (_adaptive(momentum="reset", optimizer_state="average"), ("momentum", "optimizer_state")),
        ({"mode": "ps", **_local()}, ("localsgd", "mode")),
        ({"mode": "ps", **_adaptive()}, ("adaptive_localsgd", "mode")),
        ({"mode": "ps", "use_hierarchical_allreduce": True}, ("use_hierarchical_allreduce", "mode")),
        ({"a_sync": True}, ("a_sync", "mode")),
    ):
        message = refusal(fields)
        assert message is not None
        assert all(name in message for name in names)


def test_the_docs_table_is_the_codes() -> None:
    """The matrix and the reasons of docs/combinations.md are what the code answers; copy them from this failure where it changed."""
    text = (DOCS / "combinations.md").read_text(encoding="utf-8")
    assert table() in text, f"docs/combinations.md should hold\n{table()}"
    assert reasons() in text, f"docs/combinations.md should hold\n{reasons()}"


def test_the_docs_strategies_load(tmp_path: Path) -> None:
    """Every TOML block on the pages of strategies is a strategy file, changes something, and is planned."""
    blocks = [
        block for page in PAGES for block in re.findall(r"^```toml\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    ]
    assert len(blocks) >= 10
    for index, block in enumerate(blocks):
        path = tmp_path / f"{index}.toml"
        path.write_text(block, encoding="utf-8")
        strategy = DistributedStrategy.load(path)
        assert strategy != DistributedStrategy()
        driven(strategy, nodes_of=8)


def test_the_docs_name_every_field() -> None:
    """A field of a collective strategy that no page of strategies mentions fails here."""
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in PLANNED if not re.search(rf"\b{name.rpartition('.')[2]}\b", text)] == []
