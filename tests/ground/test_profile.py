from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from sim_cases import with_profile

from fleetbench.cluster import Link
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Communication, Profile, compute_key, links_for, table_for
from fleetbench.quantities import BitsPerSecond, Bytes, Nanoseconds

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
    with pytest.raises(ConfigError, match=r"holds no layer table of .*batch .* trainers? a node on c"):
        table_for(with_profile(after, profile_of(before)))


def test_a_model_without_a_profile_says_what_to_do(tmp_path: Path) -> None:
    """No profile, a missing one, one that is no TOML: three messages, no traceback."""
    with pytest.raises(ConfigError, match="not known"):
        table_for(Experiment.load())
    with pytest.raises(ConfigError, match="cannot be read"):
        table_for(Experiment.load(overrides=[f"workload.profile={tmp_path / 'none.toml'}"]))
    (tmp_path / "broken.toml").write_text("[")
    with pytest.raises(ConfigError, match="not TOML"):
        Profile.load(tmp_path / "broken.toml")


def test_a_link_that_is_used_must_be_known() -> None:
    """Trainers of two nodes need the link between them; one trainer a node needs none inside."""
    two = ["cluster.nodes=2", "cluster.trainers_per_node=1"]
    with pytest.raises(ConfigError, match=r"cluster\.inter"):
        links_for(Experiment.load(overrides=two))
    intra, inter = links_for(Experiment.load(overrides=[*two, "cluster.inter.bandwidth=1 Gbit/s"]))
    assert intra is None
    assert inter is not None
