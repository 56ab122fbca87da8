"""Sharding: the blocks of a model, its groups, and what a step of each stage is told to start."""

from __future__ import annotations

from typing import Any

import pytest

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan, Setting, build_plan
from fleetbench.plan.layers import Gradient
from fleetbench.plan.replay import Decider
from fleetbench.plan.sharding import blocks_of, groups_of
from fleetbench.plan.training import CollectiveTraining, family
from fleetbench.quantities import Nanoseconds
from fleetbench.sharding_configs import ShardingConfigs
from fleetbench.strategy import DistributedStrategy

GPT = ["wte.weight", "h.0.attn.weight", "h.0.mlp.weight", "h.1.attn.weight", "h.1.mlp.weight", "ln_f.weight", "head.weight"]


def plan_of(configs: dict[str, Any], trainers: int = 4, names: list[str] = GPT, dtypes: dict[str, str] | None = None, **also: Any) -> Plan:
    """The plan of a model whose gradients of 10 numbers each are ready from its end to its begin."""
    order = reversed(list(enumerate(reversed(names), start=1)))
    gradients = {
        name: Gradient(name=name, numel=10, ready=Nanoseconds(100 * number), dtype=(dtypes or {}).get(name, "float32"))
        for number, name in order
    }
    by_readiness = sorted(gradients.values(), key=lambda gradient: gradient.ready)
    strategy = DistributedStrategy().replace(sharding=True, sharding_configs=configs, **also)
    return build_plan(strategy, by_readiness, Setting(trainers=trainers, order=tuple(names)))


def test_blocks_are_the_modules_of_lists() -> None:
    """As fully_shard is usually called: each layer of a transformer, and the rest with the whole model."""
    assert blocks_of(GPT) == {"": [GPT[0], *GPT[5:]], "h.0": GPT[1:3], "h.1": GPT[3:5]}
    resnet = ["conv1.weight", "layer1.0.conv1.weight", "layer1.1.conv1.weight", "fc.weight"]
    assert list(blocks_of(resnet)) == ["", "conv1", "layer1.0", "layer1.1"]
    assert blocks_of(["0.weight", "0.bias", "2.weight"]) == {"0": ["0.weight", "0.bias"], "2": ["2.weight"]}


def test_groups_are_neighbours_and_their_replicas() -> None:
    """Rank r is in group r // D, and those with one r % D are replicas; a whole world has neither."""
    found = groups_of(ShardingConfigs(stage=3, sharding_degree=4, reshard_after_forward=2), 8)
    assert found["shard"] == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert found["replica"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["reshard"] == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert groups_of(ShardingConfigs(), 4) == {"world": ((0, 1, 2, 3),)}
    with pytest.raises(ConfigError, match=r"does not divide the 4 trainers of a shard group \(got 3\)\nHINT: one of 2, 4"):
        groups_of(ShardingConfigs(stage=3, sharding_degree=4, reshard_after_forward=3), 8)


def test_a_scripts_own_blocks_wait_for_their_gathers() -> None:
    """Torch frees the last block too, and gathers it again at once; with gloo, a gather begins as its block does, and compute waits."""
    gradients = [Gradient(name=name, numel=10, ready=Nanoseconds(100 * number)) for number, name in enumerate(reversed(GPT), start=1)]
    strategy = DistributedStrategy(sharding=True).replace(sharding_configs={"stage": 3})
    setting = Setting(trainers=4, order=tuple(GPT), is_scripts=True, holds_scatters=True)
    plan = build_plan(strategy, gradients, setting)
    assert [block.regathers for block in plan.blocks] == [False, True, True]
    assert told_of(family(strategy, plan), plan, 1)[0] == [
        *("all_gather world 128", "gate", "all_gather world 80", "gate", "all_gather world 80", "gate"),
        *("all_gather world 80", "gate", "reduce_scatter world 80", "gate"),
        *("all_gather world 80", "gate", "reduce_scatter world 80", "gate"),
        *("reduce_scatter world 128", "gate", "update"),
    ]


def operations(configs: dict[str, Any], also: dict[str, Any] | None = None, steps: int = 1, trainers: int = 4) -> list[list[str]]:
    """What each step starts, as ``kind group bytes``."""
    plan = plan_of(configs, trainers, **(also or {}))
    strategy = DistributedStrategy().replace(sharding=True, sharding_configs=configs, **(also or {}))
    return told_of(family(strategy, plan), plan, steps)


def told_of(training: CollectiveTraining, plan: Plan, steps: int) -> list[list[str]]:
    """What each step of a training starts, as ``kind group bytes``."""
    from fleetbench.plan.drive import answers, events_of

    decider, found = Decider.start(training, 0), []
    for step in range(1, steps + 1):
        decided = [one for event in events_of(plan, step) for one in answers(decider, event, lambda _: 0.0)]
        found.append([f"{own.kind} {own.group} {own.nbytes}".replace(" world 0", "") for one in decided for own in one.operations])
    return found


def test_stage_3_of_a_shard_group() -> None:
    """HSDP: gathered and scattered among two, and shards averaged over two replicas; padded to whole shards."""
    assert operations({"stage": 3, "sharding_degree": 2}) == [
        [
            "all_gather shard 120",
            *("gate", "all_gather shard 80"),
            *("gate", "all_gather shard 80"),
            *("gate", "all_gather shard 80"),  # h.1 stays, and h.0 comes again
            *("reduce_scatter shard 80", "all_reduce replica 40"),
            "gate",
            *("gate", "reduce_scatter shard 80", "all_reduce replica 40"),  # after the scatter before it
            *("gate", "reduce_scatter shard 120", "all_reduce replica 60"),
            "update",
        ]
    ]


@pytest.mark.parametrize(
    ("stage", "first", "last"),
    [
        (1, ["all_gather"] * 3, ["reduce_scatter"] * 3),
        (2, ["all_gather"] * 3 + ["reduce_scatter"] * 3, ["reduce_scatter"] * 3),
        (3, ["all_gather"] * 4 + ["reduce_scatter"] * 3, ["all_gather"] * 4 + ["reduce_scatter"] * 3),
    ],
)
def test_micro_batches_of_one_update(stage: int, first: list[str], last: list[str]) -> None:
    """Stage 1 exchanges after the last alone; stages 1 and 2 keep what is gathered until the update; replicas meet once."""
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    found = operations({"stage": stage}, merge, steps=3)
    kinds = [sorted(own.split()[0] for own in step if own.split()[0] in ("all_gather", "reduce_scatter")) for step in found]
    assert kinds == [first, last, first]
    over_replicas = operations({"stage": stage, "sharding_degree": 2}, merge, steps=2)
    assert [sum("replica" in own for own in step) for step in over_replicas] == [0, 3]


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        (
            {"stage": 2, "reshard_after_forward": False},
            "reshard_after_forward: is of stage 3, and stage 2 keeps parameters until the update",
        ),
        ({"mp_degree": 2}, "sharding_configs.mp_degree: is Paddle's, and not here"),
        ({"segment_broadcast_MB": 32.0}, "sharding_configs.segment_broadcast_MB: is Paddle's, and not here"),
    ],
)
def test_what_has_no_meaning_here_is_named(configs: dict[str, Any], message: str) -> None:
    """Fields of another stage, and Paddle's own, with what to use instead."""
    with pytest.raises(ConfigError) as caught:
        DistributedStrategy.from_dict({"sharding": True, "sharding_configs": configs})
    assert message in str(caught.value)
    assert caught.value.hint
