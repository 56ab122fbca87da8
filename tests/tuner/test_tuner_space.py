import dataclasses
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import tuner_fakes
from sim_cases import link, profiled, with_profile

from fleetbench.config import encode
from fleetbench.experiment import Experiment
from fleetbench.quantities import MIB
from fleetbench.strategy import AdaptiveLocalSGDConfigs, BuildStrategy, DistributedStrategy, GradientMergeConfigs, LocalSGDConfigs
from sim.run import simulate
from tuner.pytorch import bucket_sizes_mb
from tuner.space import Equivalence, Space, name_of, search_space, with_different_sizes

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


def test_local_steps_are_searched_where_a_target_prices_them() -> None:
    """With a target every K of the restriction is a choice."""
    space = search_space(target_experiment(local_steps=(1, 2, 16)))
    assert dict(space.choices)["local_steps"] == (1, 2, 16)


def test_adam_takes_local_steps() -> None:
    """Rounds longer than an update take any optimizer, whose state stays with its trainer; K = 1 is synchronous training."""
    data = encode(target_experiment(local_steps=(1, 2, 4)))
    data["workload"]["optimizer"] = "adam"
    space = search_space(Experiment.from_dict(data))
    assert dict(space.choices)["local_steps"] == (1, 2, 4)


def test_local_steps_that_fragments_do_not_divide_are_left_out() -> None:
    """A strategy with two fragments searches even K alone, and says why."""
    space = search_space(
        with_strategy(target_experiment(local_steps=(2, 3, 4)), localsgd=True, localsgd_configs={"k_steps": 4, "fragments": 2})
    )
    assert dict(space.choices)["local_steps"] == (2, 4)
    assert any("multiple of the 2 fragments" in note for note in map(str, space.notes))


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


def test_where_a_communicator_carries_one_it_makes_no_difference_whether_it_waits() -> None:
    """On NCCL one communicator is in order either way, so that nothing is searched there; on gloo two buckets are in flight."""
    found: dict[str, Space] = {}
    for backend, device in (("gloo", "cpu"), ("nccl", "cuda")):
        experiment = layers_experiment(nccl_comm_num=(1,))
        experiment = experiment.replace(run=dataclasses.replace(experiment.run, backend=backend, device=device))
        found[backend] = search_space(experiment)
    assert "sync_nccl_allreduce" in dict(found["gloo"].choices)
    assert "sync_nccl_allreduce" not in dict(found["nccl"].choices)
    assert any("carries one collective at a time" in note for note in map(str, found["nccl"].notes))


def test_one_value_fixes_a_parameter() -> None:
    """A restriction to one value is not searched, and holds in every candidate."""
    space = search_space(layers_experiment(nccl_comm_num=(2,), fuse_grad_size_in_MB=(1.0, 4.0), fusion=(), update_by_bucket=(False,)))
    assert [name for name, _ in space.choices] == ["fusion"]
    assert {space.strategy(point).nccl_comm_num for point in space.points()} == {2}
    assert space.size == 2


def test_one_communicator_waits_only_where_that_is_allowed() -> None:
    """A default of two communicators never waits; of what the file allows, one communicator of gloo waits, or runs free, or does both."""
    for allowed in ((True,), (False,), (True, False)):
        experiment = layers_experiment(nccl_comm_num=(1, 2), sync_nccl_allreduce=allowed)
        space = search_space(with_strategy(experiment, nccl_comm_num=2, sync_nccl_allreduce=False))
        strategies = [space.strategy(point) for point in space.points()]
        assert {strategy.sync_nccl_allreduce for strategy in strategies if strategy.nccl_comm_num == 1} == set(allowed)


def test_more_threads_than_cores_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainers of two threads on two cores would stop each other, whatever a profile of compute alone says."""
    monkeypatch.setattr("tuner.space.os.cpu_count", lambda: 2)
    experiment = profiled_experiment(tmp_path, thread_num=(1, 2))
    experiment = experiment.replace(cluster=dataclasses.replace(experiment.cluster, nodes=1, trainers_per_node=2))
    space = search_space(experiment)
    assert "thread_num" not in dict(space.choices)
    assert any("thread_num = 2 is not searched" in note and "2 cores" in note for note in map(str, space.notes))


def test_a_thread_count_without_a_table_is_left_out(tmp_path: Path) -> None:
    """The profile knows one and two threads; four are not searched, and a note says so."""
    space = search_space(profiled_experiment(tmp_path, thread_num=(1, 2, 4)))
    assert dict(space.choices)["thread_num"] == (1, 2)
    assert any(note.startswith("tune.thread_num = 4 is not searched") for note in map(str, space.notes))


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


def test_sizes_stay_caps_of_ddp_where_its_buckets_are_the_default() -> None:
    """A script of plain DDP may give each of them as ``bucket_cap_mb``; its own smaller first bucket goes with its own cap alone."""
    own = DistributedStrategy(fusion="ddp", fuse_grad_size_in_MB=25.0, first_bucket_size_in_MB=1.0, sync_nccl_allreduce=False)
    space = search_space(with_strategy(layers_experiment(fuse_grad_size_in_MB=(1.0, 25.0), fusion=()), **own.changes()))
    found = {space.strategy(point).replace(build_strategy=BuildStrategy()) for point in space.points()}
    assert {one for one in found if not one.sync_nccl_allreduce and one.nccl_comm_num == 1} == {
        own,
        own.replace(fuse_grad_size_in_MB=1.0, first_bucket_size_in_MB=0.0),
    }


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


def test_threads_have_tables_of_their_own(tmp_path: Path) -> None:
    """With a profile two threads are another table, so another simulation."""
    same = Equivalence(profiled_experiment(tmp_path))
    assert same.key(DistributedStrategy()) != same.key(DistributedStrategy(thread_num=2))


def test_a_single_trainer_has_one_plan() -> None:
    """Nothing travels, so fusion decides nothing but buckets, and communicators nothing at all."""
    same = Equivalence(layers_with({}, {"nodes": 1}))
    assert same.key(DistributedStrategy()) == same.key(DistributedStrategy(nccl_comm_num=2, sync_nccl_allreduce=False))


def test_keys_of_notes_can_be_typed_back() -> None:
    """What a note says of a value is an override that sets a list of it, and the file has that key."""
    experiment = layers_experiment(thread_num=(1, 4096), hierarchy=("off", "leader"), fusion=("off",), fuse_grad_size_in_MB=())
    notes = search_space(experiment.replace(run=replace(experiment.run, device="cpu"))).notes
    found = [re.match(r"(tune\.\w+)(?: stays| =) (\S+?)(?::| is)", str(note)) for note in notes]
    assert len(found) > 2
    for one in found:
        assert one is not None
        Experiment.load(overrides=[f"{one[1]}=[{one[2]}]"])


def test_sizes_of_equal_buckets_are_one_value() -> None:
    """Ten layers of 0.38 MiB: 0.2 and 0.3 MiB send each alone, 4 and 64 all together; the experiment's own 32 stands for these."""
    experiment = layers_experiment(fuse_grad_size_in_MB=(0.2, 0.3, 0.5, 4.0, 32.0, 64.0), fusion=("off", "optimal"))
    space = with_different_sizes(search_space(experiment), Equivalence(experiment))
    assert dict(space.choices)["fusion"] == (0.3, 0.5, 32.0, "off", "optimal")


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
