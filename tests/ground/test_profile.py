from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_cases import with_profile

from fleetbench.cluster import Link
from fleetbench.config import decode, encode
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Communication, Profile, compute_key, compute_part, links_for, table_for
from fleetbench.quantities import BitsPerSecond, Bytes, Nanoseconds
from fleetbench.strategy import DistributedStrategy

LINK = Link(bandwidth=BitsPerSecond(10**10), latency=Nanoseconds(50_000))


def profile_of(*experiments: Experiment) -> Profile:
    """A profile that holds one small table for each experiment."""
    layer = Layer(
        name="fc",
        gradients=(Gradient(name="fc.weight", numel=10, ready=Nanoseconds(7)),),
        forward=Nanoseconds(5),
        backward=Nanoseconds(9),
        activation_bytes=Bytes(64),
    )
    tables = tuple(LayerTable(key=compute_key(experiment), layers=(layer,), contention=0.1) for experiment in experiments)
    communication = Communication(backend="gloo", trainers=2, link=LINK)
    return Profile(machine="a machine", created="2025-01-01", tables=tables, communication=communication)


def test_a_stored_profile_loads_as_itself(tmp_path: Path) -> None:
    """Times survive their units, to the nanosecond."""
    profile = profile_of(Experiment.load())
    profile.save(tmp_path / "profile.toml")
    assert Profile.load(tmp_path / "profile.toml") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["profile.toml"]


def test_a_profile_of_another_schema_is_refused_before_its_keys(tmp_path: Path) -> None:
    """An older one, and one whose keys this version cannot know: each names its schema and what to do."""
    for schema, more in ((1, ""), (99, "[new]\nthings = 1\n")):
        path = tmp_path / f"{schema}.toml"
        path.write_text(f'schema = {schema}\nmachine = "m"\ncreated = "c"\ntables = []\n{more}', encoding="utf-8")
        with pytest.raises(ConfigError, match=f"got {schema}") as caught:
            Profile.load(path)
        assert "take the profile again" in str(caught.value.hint)


def test_a_link_between_nodes_is_used_between_nodes() -> None:
    """What was measured there serves there, and says nothing of links inside a node."""
    experiment = Experiment.load(overrides=["cluster.nodes=2", "cluster.trainers_per_node=1"])
    profile = profile_of(experiment)
    assert profile.communication is not None
    between = dataclasses.replace(profile, communication=dataclasses.replace(profile.communication, between="nodes"))
    assert links_for(with_profile(experiment, between)) == (None, LINK)
    with pytest.raises(ConfigError, match=r"cluster\.inter"):
        links_for(with_profile(experiment, profile))


@pytest.mark.parametrize(
    "override",
    [
        "workload.batch_size=64",
        "workload.model=digits_cnn",
        "workload.model_options={ hidden = 10 }",
        "workload.dtype=float64",
        "workload.optimizer=momentum",
        "strategy.thread_num=2",
        "strategy.amp=true",
        "strategy.recompute=true",
        "strategy.build_strategy.fuse_bn_act_ops=true",
        "strategy.sync_batch_norm=true",
        "run.device=cuda",
        "cluster.trainers_per_node=4",
    ],
)
def test_what_changes_compute_needs_another_table(override: str) -> None:
    """The key differs, and the table of the other setting is refused, not scaled."""
    before, after = Experiment.load(), Experiment.load(overrides=[override])
    assert compute_key(after) != compute_key(before)
    assert table_for(with_profile(before, profile_of(after, before))).key == compute_key(before)
    with pytest.raises(ConfigError, match="holds no layer table of this workload"):
        table_for(with_profile(after, profile_of(before)))


def test_trainers_that_sleep_share_no_cores() -> None:
    """All nodes of a testbed compute on one machine, so that their number counts; emulated ones sleep by the times of one node."""
    two, three = (Experiment.load(overrides=[f"cluster.nodes={nodes}", "run.launcher=testbed"]) for nodes in (2, 3))
    assert compute_key(two) != compute_key(three)
    assert compute_key(two) != compute_key(Experiment.load(overrides=["cluster.nodes=2"]))
    emulated = [Experiment.load(overrides=[f"cluster.nodes={nodes}", "run.launcher=testbed", "run.device=emulated"]) for nodes in (2, 3)]
    assert len({compute_key(experiment) for experiment in (*emulated, Experiment.load(overrides=["cluster.nodes=2"]))}) == 1


@pytest.mark.parametrize(
    "override", ["run.seed=1", "workload.steps=7", "strategy.nccl_comm_num=2", "strategy.localsgd=true", "workload.lr=1"]
)
def test_what_does_not_change_compute_shares_a_table(override: str) -> None:
    """Seed, steps, communication and the learning rate leave the times of the layers alone."""
    assert compute_key(Experiment.load(overrides=[override])) == compute_key(Experiment.load())


@pytest.mark.parametrize(
    "changes",
    [
        {"thread_num": 2, "nccl_comm_num": 2, "fuse_grad_size_in_MB": 1.0},
        {"amp": True, "amp_configs": {"dtype": "bf16"}, "localsgd": True, "localsgd_configs": {"k_steps": 8}},
        {"recompute": True, "recompute_configs": {"checkpoints": ["fc"]}, "gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
        {"build_strategy": {"fuse_all_optimizer_ops": True}, "bf16_allreduce": True},
        {"sync_batch_norm": True, "find_unused_parameters": True},
    ],
)
def test_the_compute_part_has_the_same_table_and_no_communication(changes: dict[str, object]) -> None:
    """Its key is the strategy's, and every other field has its default: what is measured under a key is what the key names."""
    strategy = DistributedStrategy.from_dict(changes)
    part = compute_part(strategy)
    assert compute_key(Experiment.load(), part) == compute_key(Experiment.load(), strategy)
    compute = {"thread_num", "amp", "amp_configs", "recompute", "recompute_configs", "build_strategy", "sync_batch_norm"}
    assert part.changes() == {name: value for name, value in strategy.changes().items() if name in compute}
    assert compute_part(part) == part


def test_a_model_without_a_profile_says_what_to_do(tmp_path: Path) -> None:
    """No profile, a missing one, one that is no TOML: three messages, no traceback."""
    with pytest.raises(ConfigError, match="not known"):
        table_for(Experiment.load())
    with pytest.raises(ConfigError, match="cannot be read"):
        table_for(Experiment.load(overrides=[f"workload.profile={tmp_path / 'none.toml'}"]))
    (tmp_path / "broken.toml").write_text("[")
    with pytest.raises(ConfigError, match="not TOML"):
        Profile.load(tmp_path / "broken.toml")


def test_a_declared_link_goes_before_the_measured_one() -> None:
    """The simulator believes the file first, less Ethernet's headers, and what was measured in the loop where the file is silent."""
    declared = Link(bandwidth=BitsPerSecond(round(10**9 * 1448 / 1514)), payload=True)
    experiment = Experiment.load(overrides=["cluster.nodes=2", "cluster.inter.bandwidth=1 Gbit/s"])
    assert links_for(with_profile(experiment, profile_of(experiment))) == (LINK, declared)


def test_a_link_that_is_used_must_be_known() -> None:
    """Trainers of two nodes need the link between them; one trainer a node needs none inside."""
    two = ["cluster.nodes=2", "cluster.trainers_per_node=1"]
    with pytest.raises(ConfigError, match=r"cluster\.inter"):
        links_for(Experiment.load(overrides=two))
    intra, inter = links_for(Experiment.load(overrides=[*two, "cluster.inter.bandwidth=1 Gbit/s"]))
    assert intra is None
    assert inter is not None


@given(st.integers(1, 2**40), st.integers(0, 2**40))
def test_any_measured_link_is_stored_exactly(bandwidth: int, latency: int) -> None:
    """Bits per second and nanoseconds that no unit divides are kept."""
    link = Link(bandwidth=BitsPerSecond(bandwidth), latency=Nanoseconds(latency))
    assert decode(encode(link), Link, "") == link
