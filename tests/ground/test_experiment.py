from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fleetbench.cluster import Cluster, Link, NodeOverride, Racks
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment, Run, Tune
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.stragglers import Episode, Jitter, SlowRank
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LayerSpec, LossCurve, LrDecay, Workload

FILES = Path(__file__).parent / "files"
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


def test_old_experiment_files_open() -> None:
    """A file of schema 1 means for ever what it meant when it was written."""
    gbit, us, ms = 10**9, 1000, 10**6
    expected = Experiment(
        name="kept-open",
        workload=Workload(
            model="layers",
            layers=(LayerSpec(name="block", params=31_250, forward=Nanoseconds(5 * ms // 2), backward=Nanoseconds(5 * ms), repeat=20),),
            batch_size=16,
            steps=600,
            optimizer="momentum",
            lr_decay=(LrDecay(step=400, factor=0.1),),
            target_loss=0.3,
            loss_curve=LossCurve(start=2.3, floor=0.2, half_life=150.0),  # type: ignore[arg-type]  # a NewType of float
        ),
        cluster=Cluster(
            nodes=2,
            trainers_per_node=4,
            intra=Link(bandwidth=BitsPerSecond(2400 * gbit), latency=Nanoseconds(3 * us)),
            inter=Link(bandwidth=BitsPerSecond(25 * gbit), latency=Nanoseconds(20 * us)),
            racks=Racks(nodes=8, oversubscription=4.0),
            node_overrides=(NodeOverride(nodes=(1,), inter=Link(bandwidth=BitsPerSecond(10 * gbit)), slowdown=1.5),),
            stragglers=(
                Jitter(mean=0.2),
                SlowRank(ranks=(3,), factor=1.5),
                Episode(rate=0.01, length=20.0, factor=3.0),  # type: ignore[arg-type]  # NewTypes of numbers
            ),
        ),
        run=Run(environment={"NCCL_DEBUG": "INFO"}),
        tune=Tune(pairs=6, min_gain=0.01),
    )
    assert Experiment.load(FILES / "experiment_schema1.toml") == expected


def test_the_resolved_file_is_the_experiment(tmp_path: Path) -> None:
    """What ``to_toml`` writes loads as the same experiment with the same digest."""
    for original in (Experiment.load(), Experiment.load(FILES / "experiment_schema1.toml")):
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


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.batch_size", "not an override"),
        ("=3", "not an override"),
        ("workload..x=3", "not an override"),
        ("name.x=3", "is not a table"),
        ("workload.batch_sise=3", "Did you mean 'batch_size'"),
        ("workload.batch_size=many", "expected a whole number"),
        ("cluster.stragglers.0.mean=3", "is not a table"),
    ],
)
def test_wrong_overrides_are_refused(override: str, message: str) -> None:
    """An override is checked like the file it changes."""
    with pytest.raises(ConfigError, match=message):
        Experiment.load(overrides=[override])


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


def test_an_experiment_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Some editors write one; it is no part of the TOML."""
    path = tmp_path / "e.toml"
    path.write_bytes(b'\xef\xbb\xbfname = "marked"\n')
    assert Experiment.load(path).name == "marked"


@pytest.mark.parametrize("text", ["", "\n# nothing yet\n"])
def test_an_empty_file_is_no_experiment(text: str, tmp_path: Path) -> None:
    """It would run the quickstart without a word; the hint says how to run that, and overrides do not fill the file."""
    path = write(tmp_path / "empty.toml", text)
    for overrides in ([], ["run.seed=3"]):
        with pytest.raises(ConfigError, match="holds no experiment") as error:
            Experiment.load(path, overrides)
        assert "quickstart" in str(error.value.hint)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('[cluster.stragglers]\nkind = "jitter"\n', "cluster.stragglers"),
        ("[workload]\nlr_decay = { step = 3, factor = 0.1 }\n", "workload.lr_decay"),
    ],
)
def test_one_table_where_a_list_of_them_belongs(text: str, key: str, tmp_path: Path) -> None:
    """[cluster.stragglers] for [[cluster.stragglers]]: the message names the key, the hint the brackets."""
    with pytest.raises(ConfigError, match="is a list of tables, and one table is given") as error:
        Experiment.load(write(tmp_path / "e.toml", text))
    assert error.value.where == key
    assert "[[...]]" in str(error.value.hint)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"params": 10**17}, "bytes of 600 steps"),
        ({"params": 2**63 // (2 * 4 * 600) + 1}, "bytes of 600 steps"),
        ({"backward": "9000000000 s"}, "nanoseconds of 600 steps"),
        ({"repeat": 10**12}, "at most 1000000"),
    ],
    ids=str,
)
def test_layers_beyond_what_64_bits_count_are_refused(entry: dict[str, Any], message: str) -> None:
    """Bytes and nanoseconds are counted in 64 bits over a whole run; one parameter less passes."""
    (layer,) = LAYERS["layers"]
    with pytest.raises(ConfigError, match=message):
        Experiment.from_dict({"workload": {**LAYERS, "layers": [{**layer, **entry}]}})
    Experiment.from_dict({"workload": {**LAYERS, "layers": [{**layer, "params": 2**63 // (2 * 4 * 600)}]}})


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
    "entry",
    [
        {"params": 5, "rows": 10, "touched": 1},
        {"rows": 10},
        {"rows": 10, "touched": 11},
        {"rows": 10, "touched": 1, "width": 0},
        {"touched": 1},
    ],
    ids=str,
)
def test_an_embedding_touches_some_of_its_rows(entry: dict[str, Any]) -> None:
    """Rows stand in place of params; a step touches one of them at least, and all at most."""
    times = {"name": "b", "forward": "1 ms", "backward": "2 ms"}
    with pytest.raises(ConfigError, match=r"needs one of params, tensors and rows|touches at least one row"):
        Experiment.from_dict({"workload": {"model": "layers", "layers": [times | entry]}})
    embedding = times | {"rows": 10, "touched": 10, "width": 3}
    (spec,) = Experiment.from_dict({"workload": {"model": "layers", "layers": [embedding]}}).workload.layers
    assert spec.gradients == {"weight": 30}


def test_the_hint_for_a_missing_table_of_layers_is_one() -> None:
    """What the hint shows can be pasted below [workload]: twenty layers of 31,250 parameters."""
    with pytest.raises(ConfigError) as error:
        Experiment.from_dict({"workload": {"model": "layers"}})
    pasted = Experiment.from_dict({"workload": {"model": "layers", **tomllib.loads(error.value.hint or "")}})
    assert sum(spec.params * spec.repeat for spec in pasted.workload.layers) == 625_000


def test_the_search_space_defaults_contain_fleets_defaults() -> None:
    """The default strategy lies inside the space that is searched by default."""
    tune, default = Tune(), DistributedStrategy()
    assert default.fuse_grad_size_in_MB in tune.fuse_grad_size_in_MB
    assert default.nccl_comm_num in tune.nccl_comm_num
    assert default.thread_num in tune.thread_num
    assert default.local_steps in tune.local_steps


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_SOCKET_IFNAME", "^docker0,lo"),
        ("NCCL_SOCKET_IFNAME", "=eth0:1"),
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_IB_DISABLE", "0"),
        ("NCCL_IB_HCA", "mlx5_0:1,mlx5_1:1"),
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_ALGO", "allreduce:tree,ring;allgather:ring"),
        ("NCCL_PROTO", "^LL128"),
        ("NCCL_BUFFSIZE", "8388608"),
        ("NCCL_MIN_NCHANNELS", "4"),
        ("NCCL_NET_GDR_LEVEL", "PHB"),
        ("GLOO_SOCKET_IFNAME", "eth0.100"),
        ("OMP_NUM_THREADS", "2"),
        ("OMP_PLACES", "{0:4}:2"),
        ("KMP_AFFINITY", "granularity=fine,compact,1,0"),
        ("TORCH_NCCL_HIGH_PRIORITY", "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1"),
        ("PYTHONWARNINGS", "ignore"),
    ],
)
def test_what_users_of_nccl_and_gloo_tune_may_be_set(name: str, value: str) -> None:
    """Fleet's five variables among it."""
    assert Experiment.from_dict({"run": {"environment": {name: value}}}).run.environment == {name: value}
