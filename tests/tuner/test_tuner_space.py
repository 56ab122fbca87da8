import dataclasses
from functools import partial

import pytest
import tuner_fakes
from sim_cases import link, profiled, with_profile

from fleetbench.experiment import Experiment
from fleetbench.quantities import MIB
from fleetbench.strategy import AdaptiveLocalSGDConfigs, BuildStrategy, DistributedStrategy, GradientMergeConfigs, LocalSGDConfigs
from sim.run import simulate
from tuner.pytorch import bucket_sizes_mb
from tuner.space import Equivalence, name_of, search_space

RULES = ("merged_gradient", "optimal", "off")
WHOLE: dict[str, object] = {"local_steps": (1, 2, 4, 8, 16), "wire": ("fp32", "fp16", "bf16"), "update_by_bucket": (False, True)}
layers_experiment = partial(tuner_fakes.layers_experiment, **WHOLE)
target_experiment = partial(tuner_fakes.target_experiment, **WHOLE)
layers_with = partial(tuner_fakes.layers_with, **WHOLE)
profiled_experiment = partial(tuner_fakes.profiled_experiment, **WHOLE)


def with_strategy(experiment: Experiment, **changes: object) -> Experiment:
    """The experiment with another default."""
    return experiment.replace(strategy=DistributedStrategy().replace(**changes))


def test_local_steps_are_not_searched_without_a_target() -> None:
    """Without a price K stays where it is, and a note says why."""
    space = search_space(layers_experiment())
    assert "local_steps" not in dict(space.choices)
    assert all(space.strategy(point).local_steps == 1 for point in space.points())
    assert any(note.startswith("tune.local_steps stays 1") and "target_loss" in note for note in map(str, space.notes))


def test_one_step_is_plain_synchronous_training() -> None:
    """K = 1 switches Local SGD off, also where the experiment's own strategy has it on."""
    experiment = with_strategy(target_experiment(local_steps=(1, 4)), localsgd=True, localsgd_configs={"k_steps": 4, "begin_step": 7})
    space = search_space(experiment)
    point = next(space.points())
    assert space.strategy(point | {"local_steps": 1}).localsgd is False
    four = space.strategy(point | {"local_steps": 4})
    assert (four.localsgd_configs.k_steps, four.localsgd_configs.begin_step) == (4, 7)


def test_several_communicators_run_free() -> None:
    """More than one communicator goes with sync_nccl_allreduce = false, and one is tried with it and without."""
    space = search_space(layers_experiment())
    seen = {(space.strategy(point).nccl_comm_num, space.strategy(point).sync_nccl_allreduce) for point in space.points()}
    assert seen == {(1, True), (1, False), (2, False)}


def test_every_rule_of_fusion_is_tried_whatever_the_own_one_is() -> None:
    """Sizes, both rules by cost, and a bucket a gradient; a rule has no size, so that each is one strategy."""
    for own in ({}, {"fuse_all_reduce_ops": False}, {"fusion": "by_number", "fuse_grad_size_in_num": 4}):
        space = search_space(with_strategy(layers_experiment(fuse_grad_size_in_MB=(1.0, 4.0), fusion=RULES), **own))
        found = {space.strategy(point) for point in space.points()}
        plain = {strategy.replace(nccl_comm_num=1, sync_nccl_allreduce=True, build_strategy=BuildStrategy()) for strategy in found}
        assert plain == {
            DistributedStrategy(fuse_grad_size_in_MB=1.0),
            DistributedStrategy(fuse_grad_size_in_MB=4.0),
            DistributedStrategy(fusion="merged_gradient"),
            DistributedStrategy(fusion="optimal"),
            DistributedStrategy(fuse_all_reduce_ops=False),
        }
        assert len(found) == 5 * 3 * 2  # communicators: one in turn, one free, two; update at the end or by bucket


def test_many_gradients_are_not_sent_each_alone() -> None:
    """Ten may travel alone, 65 may not, unless the experiment's own strategy does so; a note says why."""
    many = layers_with({"layers": [{"name": "block", "params": 1_000, "forward": "1 ms", "backward": "2 ms", "repeat": 65}]}, fusion=RULES)
    space = search_space(many)
    assert "off" not in dict(space.choices)["fusion"]
    assert any(
        note.startswith('tune.fusion = "off" is not searched: an all-reduce for each of 65 gradients') for note in map(str, space.notes)
    )
    assert "off" in dict(search_space(with_strategy(many, fuse_all_reduce_ops=False)).choices)["fusion"]
    assert "off" in dict(search_space(layers_experiment(fusion=RULES)).choices)["fusion"]


def test_a_hierarchy_is_tried_where_there_are_nodes_of_several_trainers() -> None:
    """Both variants on two nodes of two; on nodes of one trainer a note says why not."""
    space = search_space(layers_with({}, {"trainers_per_node": 2, "intra": {"bandwidth": "10 Gbit/s", "latency": "5 us"}}))
    assert dict(space.choices)["hierarchy"] == ("off", "leader", "reduce_scatter")
    shapes = {(strategy.use_hierarchical_allreduce, strategy.hierarchical_variant) for strategy in map(space.strategy, space.points())}
    assert shapes == {(False, "leader"), (True, "leader"), (True, "reduce_scatter")}
    assert any(note.startswith('tune.hierarchy stays "off"') for note in map(str, search_space(layers_experiment()).notes))


def test_rounding_needs_leave_or_a_target() -> None:
    """A 16-bit wire changes sums: it is searched where the file allows it, or a target prices it, and never beside local steps."""
    assert "wire" not in dict(search_space(layers_experiment()).choices)
    assert dict(search_space(layers_experiment(allow=("wire16",))).choices)["wire"] == ("fp32", "fp16", "bf16")
    space = search_space(target_experiment(local_steps=(1, 4)))
    found = {(point["local_steps"], point["wire"]) for point in space.points()}
    assert found == {(1, "fp32"), (1, "fp16"), (1, "bf16"), (4, "fp32")}


def test_a_scripts_update_is_not_taken_ahead() -> None:
    """What a script does with its gradients before the update cannot be known; an experiment's loop does nothing."""
    experiment = layers_experiment()
    assert dict(search_space(experiment).choices)["update_by_bucket"] == (False, True)
    script = experiment.replace(run=dataclasses.replace(experiment.run, launcher="command", device="cpu"))
    assert "update_by_bucket" not in dict(search_space(script).choices)


def test_a_point_is_found_again() -> None:
    """Every candidate's point is its own, and a strategy that differs elsewhere has none."""
    space = search_space(target_experiment())
    assert all(space.point_of(space.strategy(point)) == point for point in space.points())
    assert space.point_of(DistributedStrategy(fuse_grad_size_in_MB=3.0)) is None
    assert space.point_of(DistributedStrategy(fuse_grad_count=7)) is None


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        ({"fuse_grad_size_in_MB": 32.0}, {"fuse_grad_size_in_MB": 64.0}, True),  # all ten gradients in one bucket
        ({"fuse_grad_size_in_MB": 32.0}, {"fuse_grad_size_in_MB": 1.0}, False),
        ({"fuse_grad_size_in_MB": 1.0}, {"fuse_grad_size_in_MB": 1.0, "nccl_comm_num": 2, "sync_nccl_allreduce": False}, False),
        ({}, {"localsgd": True}, False),  # averages parameters after the update
        ({"localsgd": True, "localsgd_configs": {"k_steps": 2}}, {"localsgd": True, "localsgd_configs": {"k_steps": 4}}, False),
        ({"thread_num": 1}, {"thread_num": 2}, True),  # a declared table
    ],
)
def test_equal_keys_mean_equal_plans_cadences_and_tables(one: dict[str, object], other: dict[str, object], *, equal: bool) -> None:
    """Strategies share a key exactly where nothing that is simulated differs."""
    same = Equivalence(layers_experiment())
    keys = [same.key(DistributedStrategy().replace(**changes)) for changes in (one, other)]
    assert (keys[0] == keys[1]) is equal


@pytest.mark.parametrize("apart_ns", [200_000, 2_000_000])
def test_buckets_by_cost_have_the_key_and_the_sizes_of_what_is_simulated(apart_ns: int) -> None:
    """Where starting a bucket takes compute and exchange slows it, also if the experiment's own strategy fuses by size."""
    layers = [([100_000], [apart_ns * (24 - number)], 1, apart_ns) for number in range(24)]
    disturbs = {"host_per_collective": 400_000, "contention": 0.5, "collective_contention": 0.5}
    fused, alone = {"fuse_all_reduce_ops": True, "fusion": "ddp"}, {"fuse_all_reduce_ops": False, "fusion": "fleet"}
    case = with_profile(*profiled(layers, disturbs, inter=link(1_000, 50_000), strategy=fused))
    same = Equivalence(case)
    found = [case.strategy.replace(**one) for one in ({"fusion": "optimal"}, {"fusion": "merged_gradient"}, alone)]
    plans = [simulate(case.replace(strategy=one)).plan.buckets for one in found]
    for one, buckets in zip(found, plans, strict=True):
        assert bucket_sizes_mb(case, one) == tuple(bucket.nbytes / MIB for bucket in buckets)
        for other, others in zip(found, plans, strict=True):
            assert (same.key(one) == same.key(other)) == (buckets == others)


def test_for_one_trainer_compute_alone_is_searched() -> None:
    """It exchanges nothing: fusion would change nothing but names."""
    space = search_space(layers_with({}, {"nodes": 1}))
    assert {name for name, _ in (*space.choices, *space.fixed)} == {"update_by_bucket"}
    assert any("one trainer exchanges nothing" in note for note in map(str, space.notes))
    assert "fusion" in {name for name, _ in search_space(layers_experiment()).choices}


def test_ways_are_named() -> None:
    """As the notes have them."""
    local = DistributedStrategy(localsgd=True, localsgd_configs=LocalSGDConfigs(k_steps=4))
    outer = local.replace(localsgd_configs=LocalSGDConfigs(k_steps=4, outer_lr=0.7, outer_momentum=0.9))
    merged = DistributedStrategy(gradient_merge=True, gradient_merge_configs=GradientMergeConfigs(k_steps=2))
    adaptive = DistributedStrategy(adaptive_localsgd=True, adaptive_localsgd_configs=AdaptiveLocalSGDConfigs(init_k_steps=2))
    assert [name_of(strategy) for strategy in (DistributedStrategy(), local, outer, merged, adaptive)] == [
        "synchronous",
        "K = 4",
        "K = 4 and an outer optimizer",
        "synchronous and 2 micro-batches an update",
        "adaptive K from 2 (fleet)",
    ]
