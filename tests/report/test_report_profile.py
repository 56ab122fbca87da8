"""A profile's folder, from a profile by hand."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pandas as pd
import pytest
from sim_cases import with_profile

from fleetbench.cli import options as cli_options
from fleetbench.cli.profile import show
from fleetbench.cluster import Cluster, Link
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.measurements import CollectivePoint, Memory, StragglerFit, Threads
from fleetbench.plan.layers import Gradient, Layer, LayerTable
from fleetbench.profile import Communication, Profile, compute_key
from fleetbench.quantities import BitsPerSecond, Bytes, Nanoseconds
from fleetbench.report.folder import measured_cluster, save_profile
from fleetbench.store import load_run
from fleetbench.stragglers import Jitter, SlowRank
from real.profile.measuring import Taken
from sim.run import simulate

LINK = Link(bandwidth=BitsPerSecond(10**9), latency=Nanoseconds(50_000))
DECLARED = SlowRank(ranks=(0,), factor=1.5)


@pytest.fixture
def experiment() -> Experiment:
    """Two trainers, one of them slow by declaration."""
    return Experiment.load(overrides=["workload.target_loss=1.0", "cluster.stragglers=[]", "workload.steps=5"]).replace(
        cluster=Cluster(trainers_per_node=2, stragglers=(DECLARED,))
    )


@pytest.fixture
def profile(experiment: Experiment) -> Profile:
    """All that can be measured, of three layers at two thread counts."""
    layers = tuple(
        Layer(
            name=name,
            gradients=(Gradient(name=f"{name}.w", numel=1000, ready=Nanoseconds(ready)),),
            forward=Nanoseconds(10**6),
            backward=Nanoseconds(2 * 10**6),
            forward_mad=Nanoseconds(1000),
        )
        for name, ready in (("a", 6 * 10**6), ("b", 4 * 10**6), ("c", 2 * 10**6))
    )
    strategy = experiment.strategy
    tables = tuple(
        LayerTable(key=compute_key(experiment, strategy.replace(thread_num=number)), layers=layers, update=Nanoseconds(10**6))
        for number in (1, 2)
    )
    points = tuple(CollectivePoint(nbytes=Bytes(size), took=Nanoseconds(100_000 + 8 * size)) for size in (100, 10_000, 10**6))
    threads = tuple(
        Threads(
            thread_num=number,
            step=Nanoseconds(10**7 // number),
            compute=Nanoseconds(9 * 10**6 // number),
            contention=0.1,
            collective_contention=0.2,
            unexplained=0.03,
        )
        for number in (1, 2)
    )
    return Profile(
        machine="a <machine>",
        created="2026-01-01",
        tables=tables,
        communication=Communication(backend="gloo", trainers=2, link=LINK, points=points, in_flight=(LINK,)),
        threads=threads,
        memory=Memory(
            parameters=Bytes(12_000), gradients=Bytes(12_000), optimizer_state=Bytes(0), activations=Bytes(99), peak=Bytes(10**8)
        ),
        stragglers=StragglerFit(
            statements=("jitter: exponential",),
            base=Nanoseconds(9 * 10**6),
            median=Nanoseconds(9_600_000),
            entries=(Jitter(distribution="exponential", mean=0.1),),
        ),
    )


def test_the_measured_cluster_is_what_sim_is_to_believe(experiment: Experiment, profile: Profile) -> None:
    """The measured link inside a node, or between nodes; measured stragglers in front of declared ones; all else as it was."""
    cluster, link = measured_cluster(experiment.cluster, profile), dataclasses.replace(LINK, payload=True)
    assert (cluster.intra, cluster.inter) == (link, None)
    assert cluster.stragglers == (Jitter(distribution="exponential", mean=0.1), DECLARED)
    assert profile.communication is not None
    outside = dataclasses.replace(profile, communication=dataclasses.replace(profile.communication, between="nodes"))
    assert (measured_cluster(experiment.cluster, outside).intra, measured_cluster(experiment.cluster, outside).inter) == (None, link)
    nothing = dataclasses.replace(profile, communication=None, stragglers=None)
    assert measured_cluster(experiment.cluster, nothing) == experiment.cluster


def test_a_folder_simulates_as_it_is(experiment: Experiment, profile: Profile, tmp_path: Path) -> None:
    """`measured.toml` finds its profile beside it, and gives the steps that the parts in memory give."""
    folder = save_profile(experiment, profile, {}, tmp_path)
    assert folder.name.startswith(f"{experiment.name}-profile-{experiment.digest()}-")
    measured = Experiment.load(folder / "measured.toml")
    expected = simulate(with_profile(experiment.replace(cluster=measured_cluster(experiment.cluster, profile)), profile))
    found = simulate(measured)
    pd.testing.assert_frame_equal(found.steps, expected.steps)
    assert (folder / "manifest.json").is_file()


def test_what_was_estimated_is_not_called_measured(
    experiment: Experiment, profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An estimate's folder holds `estimated.toml`, which the command names, and so does the hint where the folder is taken for a run."""
    estimate = dataclasses.replace(profile, estimated=0.3, stragglers=None, communication=None)
    assert show(Taken(experiment=experiment, profile=estimate), argparse.Namespace(out=tmp_path, json=False)) == 0
    (folder,) = tmp_path.iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == f"simulate with it: fleetbench sim {folder / 'estimated.toml'}"
    assert not (folder / "measured.toml").exists()
    assert Experiment.load(folder / "estimated.toml").workload.profile == str(folder / "profile.toml")
    with pytest.raises(ConfigError, match=r"holds no run\nHINT: .*estimated\.toml"):
        load_run(folder)


@pytest.mark.parametrize("name", ["profile.toml", "measured.toml"])
def test_times_without_their_stragglers_are_warned_of(
    name: str, experiment: Experiment, profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Layer times of a step that nothing delays, in an experiment that declares no stragglers, as measured.toml does."""
    cli_options._warn.cache_clear()
    folder = save_profile(experiment, profile, {}, tmp_path)
    alone = experiment.replace(
        workload=dataclasses.replace(experiment.workload, profile=str(folder / "profile.toml")),
        cluster=dataclasses.replace(experiment.cluster, stragglers=()),
    )
    given = alone if name == "profile.toml" else Experiment.load(folder / name)
    assert cli_options.with_profile(given, tmp_path) == given
    said = "declares no stragglers: simulated steps are too short" in capsys.readouterr().err
    assert said == (name == "profile.toml")
    cli_options._warn.cache_clear()
    cli_options.with_profile(given, tmp_path, simulates=False)
    assert not capsys.readouterr().err, "real runs have the machine's own stragglers"
