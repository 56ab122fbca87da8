from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fleetbench.cluster import Link
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.quantities import BitsPerSecond
from fleetbench.stragglers import Jitter
from fleetbench.strategy import DistributedStrategy

LAYERS: dict[str, Any] = {"model": "layers", "layers": [{"name": "b", "params": 10, "forward": "1 ms", "backward": "2 ms"}]}


def write(path: Path, text: str) -> Path:
    """Write a file and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_quickstart_loads() -> None:
    """Without a file the built-in experiment is read; it has something to gain and something to lose."""
    quickstart = Experiment.load()
    assert quickstart.cluster.trainers == 2
    assert quickstart.cluster.stragglers
    assert quickstart.workload.target_loss is not None
    assert quickstart.strategy == DistributedStrategy()


def test_the_resolved_file_is_the_experiment(tmp_path: Path) -> None:
    """What ``to_toml`` writes loads as the same experiment with the same digest."""
    for original in (Experiment.load(), Experiment.load(overrides=["workload.steps=7", "cluster.nodes=1"])):
        again = Experiment.load(write(tmp_path / "resolved.toml", original.to_toml()))
        assert again == original
        assert again.digest() == original.digest()


def test_overrides_reach_every_section() -> None:
    """A value is TOML, or else text; sections are made where they are missing."""
    overrides = [
        "workload.batch_size=64",
        "workload.optimizer=momentum",
        "strategy.localsgd=true",
        "strategy.localsgd_configs.k_steps = 4",
        "cluster.inter.bandwidth=10 Gbit/s",
        'cluster.stragglers=[{kind="jitter", mean=0.5}]',
        "run.environment.OMP_NUM_THREADS='1'",
        "name=other",
    ]
    experiment = Experiment.load(overrides=overrides)
    assert (experiment.name, experiment.workload.batch_size, experiment.workload.optimizer) == ("other", 64, "momentum")
    assert experiment.strategy.local_steps == 4
    assert experiment.cluster.inter == Link(bandwidth=BitsPerSecond(10**10))
    assert experiment.cluster.stragglers == (Jitter(mean=0.5),)
    assert experiment.run.environment == {"OMP_NUM_THREADS": "1"}


def test_files_are_found_beside_the_experiment_and_overrides_from_where_one_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A path in a file is relative to the file; a path on the command line to the working directory."""
    text = '[workload]\nprofile = "p.toml"\ndata = "text:corpus.txt"\n'
    path = write(tmp_path / "experiments" / "e.toml", text)
    monkeypatch.chdir(tmp_path)
    workload = Experiment.load(path).workload
    assert workload.profile == str(tmp_path / "experiments" / "p.toml")
    assert workload.data == f"text:{tmp_path / 'experiments' / 'corpus.txt'}"
    assert Experiment.load("experiments/e.toml", ["workload.profile=q.toml"]).workload.profile == str(tmp_path / "q.toml")


@pytest.mark.parametrize(
    "text",
    [
        '[workload]\nprofile = "named.txt"\n',
        '[workload]\ndata = "text:named.txt"\n',
    ],
)
def test_the_digest_covers_the_contents_of_named_files(text: str, tmp_path: Path) -> None:
    """Other contents give another digest; the same contents elsewhere give the same one."""
    here, elsewhere = write(tmp_path / "a" / "e.toml", text), write(tmp_path / "b" / "e.toml", text)
    for folder in ("a", "b"):
        write(tmp_path / folder / "named.txt", "one")
    before = Experiment.load(here).digest()
    assert Experiment.load(elsewhere).digest() == before
    write(tmp_path / "a" / "named.txt", "two")
    assert Experiment.load(here).digest() != before
    (tmp_path / "a" / "named.txt").unlink()
    with pytest.raises(ConfigError, match=r"named\.txt: cannot be read"):
        Experiment.load(here).digest()


@pytest.mark.parametrize(
    "override", ["workload.lr=0.2", "run.seed=1", "strategy.thread_num=2", "name=b", "cluster.nodes=2", "tune.pairs=7"]
)
def test_the_digest_covers_every_section(override: str) -> None:
    """Any change of the experiment changes its digest, which has eight hexadecimal digits."""
    digest = Experiment.load().digest()
    assert len(digest) == 8
    assert int(digest, 16) >= 0
    assert Experiment.load(overrides=[override]).digest() != digest


def test_a_file_that_cannot_be_read_is_a_configuration_error(tmp_path: Path) -> None:
    """Missing, a folder, not text, not TOML: each says so and none is a traceback."""
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (tmp_path / "none.toml", "No such file"),
        (tmp_path, "directory"),
        (binary, "utf-8"),
        (write(tmp_path / "broken.toml", "[workload\n"), "not TOML"),
    ):
        with pytest.raises(ConfigError, match=message):
            Experiment.load(path)


@pytest.mark.parametrize("text", ["", "\n# nothing yet\n"])
def test_an_empty_file_is_no_experiment(text: str, tmp_path: Path) -> None:
    """It would run the quickstart without a word; the hint says how to run that, and overrides do not fill the file."""
    path = write(tmp_path / "empty.toml", text)
    for overrides in ([], ["run.seed=3"]):
        with pytest.raises(ConfigError, match="holds no experiment") as error:
            Experiment.load(path, overrides)
        assert "quickstart" in str(error.value.hint)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"workload": {"model": "layers"}}, "needs a table of layers"),
        ({"workload": {"layers": LAYERS["layers"]}}, 'set model = "layers"'),
        ({"workload": {**LAYERS, "target_loss": 0.3}}, "drop target_loss"),
        ({"workload": {**LAYERS, "layers": LAYERS["layers"] * 2}}, "one name"),
        ({"workload": {**LAYERS, "layers": [{**LAYERS["layers"][0], "repeat": 3}, {**LAYERS["layers"][0], "name": "b2"}]}}, "one name"),
        ({"workload": {"lr_decay": [{"step": 0, "factor": 0.1}]}}, "step: must be at least 1"),
        ({"workload": {"lr": 0}}, "lr: must be above 0"),
        ({"cluster": {"nodes": 0}}, "at least 1"),
        ({"cluster": {"servers": -1}}, "at least 0"),
        ({"cluster": {"servers": 3, "server_placement": "shared", "nodes": 2}}, "more servers than nodes"),
        ({"cluster": {"racks": {"nodes": 0, "oversubscription": 1}}}, "rack"),
        ({"cluster": {"nodes": 2, "node_overrides": [{"nodes": [0], "slowdown": 0}]}}, "above 0"),
        ({"cluster": {"nodes": 2, "node_overrides": [{"nodes": [0], "slowdown": 1e7}]}}, "at most 1000000"),
        ({"cluster": {"nodes": 2, "node_overrides": [{"nodes": [], "slowdown": 2}]}}, "names no node"),
        ({"cluster": {"stragglers": [{"kind": "node_shock", "rate": "2 /step"}]}}, "at most 1 /step"),
        ({"run": {"backend": "nccl"}}, "CUDA"),
        ({"run": {"port": 0}}, "at most 65535"),
        ({"run": {"timeout": "1 ms"}}, "at least 1 s"),
        ({"run": {"seed": -1}}, "at least 0"),
        ({"tune": {"pairs": 1}}, "at least 2"),
        ({"tune": {"local_steps": []}}, "at least one"),
        ({"tune": {"min_gain": -0.1}}, "at least 0"),
        ({"tune": {"lr_scale": [1, 0]}}, "above 0"),
        ({"name": "a/b"}, "names a folder"),
        ({"name": ".."}, "names a folder"),
        ({"name": "-rf"}, "names a folder"),
        ({"name": ""}, "names a folder"),
    ],
    ids=str,
)
def test_parts_that_make_no_sense_are_refused(data: dict[str, Any], message: str) -> None:
    """Values of the right type and the wrong meaning are errors, with what to do instead."""
    with pytest.raises(ConfigError, match=message):
        Experiment.from_dict(data)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_NET_PLUGIN", "/x.so"),
        ("NCCL_TUNER_PLUGIN", "x"),
        ("NCCL_PROFILER_PLUGIN", "x"),
        ("NCCL_DEBUG_FILE", "/any.%h"),
        ("NCCL_TOPO_FILE", "topo.xml"),
        ("NCCL_CONF_FILE", "x"),
        ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "/x"),
        ("OMP_TOOL_LIBRARIES", "/x.so"),
        ("PYTHONWARNINGS", "ignore::module.X"),
        ("PYTHONWARNINGS", "ignore,error::module.X"),
        ("NCCL_NET", "/x"),
        ("NCCL_SOCKET_IFNAME", "../x"),
        ("NCCL_ALGO", "file:/tmp/x"),
        ("OMP_NUM_THREADS", "1\n"),
        ("OMP_PLACES", "a/b"),
        ("LD_PRELOAD", "x.so"),
    ],
)
def test_no_variable_of_an_experiment_names_a_file_a_plugin_or_a_module(name: str, value: str) -> None:
    """Nothing in an experiment file is loaded, imported or written to on its behalf."""
    with pytest.raises(ConfigError, match=rf"run\.environment\.{name}: may not be set"):
        Experiment.from_dict({"run": {"environment": {name: value}}})
