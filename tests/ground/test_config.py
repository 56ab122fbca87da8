from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import typing
from typing import Any

import pytest

import fleetbench
from fleetbench.cluster import Cluster, Link
from fleetbench.config import Config, decode, encode, field_types
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.stragglers import Episode, Jitter

GROUND = ("fleetbench", "fleetbench.plan")


def config_classes() -> list[type[Config]]:
    """Every subclass of ``Config`` that the ground defines."""
    for package in GROUND:
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
            if not module.ispkg and module.name != "fleetbench.__main__":
                importlib.import_module(module.name)
    return [cls for cls in subclasses(Config) if cls.__module__.startswith(GROUND)]


def subclasses(cls: type[Config]) -> list[type[Config]]:
    """Each class once: a slotted dataclass leaves its unslotted twin behind."""
    found = {sub.__qualname__: sub for sub in cls.__subclasses__() if "__slots__" in sub.__dict__}
    return [one for sub in found.values() for one in (sub, *subclasses(sub))]


def required(cls: type[Any]) -> dict[str, Any]:
    """Values of the right type for the fields without a default."""
    hints = field_types(cls)
    fields = [field for field in dataclasses.fields(cls) if field.default is field.default_factory]
    return {field.name: sample(hints[field.name]) for field in fields}


def sample(hint: Any) -> Any:
    """Some value of a type."""
    base = getattr(hint, "__supertype__", hint)
    if isinstance(base, type) and issubclass(base, Config):
        return base(**required(base))
    if typing.get_origin(base) is typing.Literal:
        return typing.get_args(base)[0]
    origin = typing.get_origin(base)
    return origin() if origin in (tuple, dict) else {int: 1, float: 1.0, str: "x", bool: True}[base]


@pytest.mark.parametrize("cls", config_classes(), ids=lambda cls: cls.__qualname__)
def test_every_config_is_a_frozen_slotted_keyword_only_dataclass(cls: type[Any]) -> None:
    """The convention of configuration values holds for every one of them, and so do their types."""
    assert cls.__dataclass_params__.frozen
    assert "__slots__" in cls.__dict__
    assert all(field.kw_only for field in dataclasses.fields(cls))
    assert cls.__post_init__ is Config.__post_init__ or cls.__name__ == "Workload"
    for field in dataclasses.fields(cls):
        with pytest.raises(ConfigError) as error:
            cls(**{**required(cls), field.name: object()})
        assert error.value.where == field.name


def test_the_ground_has_configs() -> None:
    """The test above is not vacuous."""
    assert {cls.__name__ for cls in config_classes()} >= {"Experiment", "Cluster", "DistributedStrategy", "Jitter", "LayerTable", "Profile"}
    assert fleetbench.__name__ == "fleetbench"


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"clster": {}}, "clster: unknown key", "Did you mean 'cluster'?"),
    ({"cluster": {"nodse": 1}}, "cluster.nodse: unknown key", "Did you mean 'nodes'?"),
    ({"cluster": {"zzz": 1}}, "cluster.zzz: unknown key", "known keys: nodes, "),
    ({"strategy": {"localsgd_configs": {"k_stepz": 4}}}, "strategy.localsgd_configs.k_stepz: unknown key", "Did you mean 'k_steps'?"),
    ({"cluster": {"inter": {"bandwith": "1 Gbit/s"}}}, "cluster.inter.bandwith: unknown key", "Did you mean 'bandwidth'?"),
    ({"cluster": {"inter": {}}}, "cluster.inter.bandwidth: this key is missing", "add bandwidth"),
    ({"cluster": {"inter": {"bandwidth": "-3 Gbit/s"}}}, "cluster.inter.bandwidth: a bandwidth cannot be negative", "'-3 Gbit/s'"),
    ({"cluster": {"inter": {"bandwidth": "3 furlongs"}}}, "cluster.inter.bandwidth: not a bandwidth", "Gbit/s"),
    ({"cluster": {"inter": {"bandwidth": 25}}}, "cluster.inter.bandwidth: a bandwidth needs a unit", "25 Gbit/s"),
    ({"cluster": {"inter": 3}}, "cluster.inter: expected a table", "got 3"),
    ({"cluster": {"stragglers": 3}}, "cluster.stragglers: expected a list", "got 3"),
    ({"cluster": {"stragglers": [{"kind": "jiter"}]}}, "cluster.stragglers[0].kind: not one of the kinds", "Did you mean 'jitter'?"),
    ({"cluster": {"stragglers": [{}]}}, "cluster.stragglers[0].kind: not one of the kinds", "choose from: jitter"),
    ({"cluster": {"stragglers": [{"kind": "jitter", "maen": 1}]}}, "cluster.stragglers[0].maen: unknown key", "Did you mean 'mean'?"),
    ({"cluster": {"stragglers": [{"kind": "slow_rank", "ranks": [7], "factor": 2}]}}, "cluster.stragglers[0].ranks: no such rank", "got 7"),
    ({"cluster": {"stragglers": [{"kind": "slow_rank", "ranks": [0], "factor": 0.5}]}}, "cluster.stragglers[0].factor:", "at least 1"),
    ({"cluster": {"node_overrides": [{"nodes": [3]}]}}, "cluster.node_overrides[0].nodes: no such node", "got 3"),
    ({"workload": 3}, "workload: expected a table", "got 3"),
    ({"workload": {"batch_size": "x"}}, "workload.batch_size: expected a whole number", "'x'"),
    ({"workload": {"batch_size": True}}, "workload.batch_size: expected a whole number", "True"),
    ({"workload": {"batch_size": 1.5}}, "workload.batch_size: expected a whole number", "1.5"),
    ({"workload": {"batch_size": 0}}, "workload.batch_size: must be at least 1", "got 0"),
    ({"workload": {"optimizer": "adan"}}, "workload.optimizer: not one of the choices", "Did you mean 'adam'?"),
    ({"workload": {"lr": float("nan")}}, "workload.lr: expected a finite number", "nan"),
    ({"workload": {"lr": "0.1"}}, "workload.lr: expected a number", "'0.1'"),
    ({"tune": {"samples": "10M"}}, "tune.samples: expected a number", "1e7 for ten million"),
    ({"workload": {"lr_decay": [{"step": 1}]}}, "workload.lr_decay[0].factor: this key is missing", "add factor"),
    ({"workload": {"lr_decay": [{"step": 1, "factr": 2}]}}, "workload.lr_decay[0].factr: unknown key", "Did you mean 'factor'?"),
    ({"workload": {"model_options": {"width": [1]}}}, "workload.model_options.width: expected", "[1]"),
    ({"tune": {"local_steps": [1, "a"]}}, "tune.local_steps[1]: expected a whole number", "'a'"),
    ({"tune": {"local_steps": "12"}}, "tune.local_steps: expected a list", "'12'"),
    (
        {"strategy": {"recompute": True, "recompute_configs": {"checkpoints": "abc"}}},
        "strategy.recompute_configs.checkpoints:",
        "a list",
    ),
    ({"strategy": {"amp": "yes"}}, "strategy.amp: expected true or false", "'yes'"),
    ({"run": {"environment": {"OMP_NUM_THREADS": 1}}}, "run.environment.OMP_NUM_THREADS: expected text", "got 1"),
    ({"run": {"environment": {"LD_PRELOAD": "x"}}}, "run.environment.LD_PRELOAD: may not be set", "NCCL_"),
    ({"run": {"timeout": "10 MB"}}, "run.timeout: not a duration", "'10 MB'"),
    ({"schema": 2, "new_section": {}}, "schema: not a schema of this version", "reads schema 1"),
]


@pytest.mark.parametrize(
    ("data", "place", "help_text"), WRONG, ids=[place.split(":")[0] + f"-{i}" for i, (_, place, _) in enumerate(WRONG)]
)
def test_a_wrong_file_says_what_where_and_how_to_mend_it(data: dict[str, Any], place: str, help_text: str) -> None:
    """The message begins with the path of the key and holds the value or the hint."""
    with pytest.raises(ConfigError) as error:
        Experiment.from_dict(data)
    assert str(error.value).startswith(place)
    assert help_text in str(error.value)


def test_values_made_in_python_are_checked_like_those_of_a_file() -> None:
    """No route around the checks: neither wrong types nor impossible quantities."""
    with pytest.raises(ConfigError, match="expected a whole number"):
        Cluster(nodes="2")  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(ConfigError, match="above 0 bit/s"):
        Link(bandwidth=BitsPerSecond(-1))
    with pytest.raises(ConfigError, match="at least 0 ns"):
        Link(bandwidth=BitsPerSecond(1), latency=Nanoseconds(-1))


def test_encoding_gives_plain_data_that_decodes_to_the_same_value() -> None:
    """Quantities are text, a straggler says its kind, what is not set is left out."""
    cluster = Cluster(
        nodes=2,
        inter=Link(bandwidth=BitsPerSecond(25 * 10**9), latency=Nanoseconds(20_000)),
        stragglers=(Jitter(mean=0.2), Episode(rate=0.01, length=20.0, factor=3.0)),  # type: ignore[arg-type]  # NewTypes of numbers
    )
    data = encode(cluster)
    assert data["inter"] == {"bandwidth": "25 Gbit/s", "latency": "20 us"}
    assert data["stragglers"][1] == {"kind": "episode", "rate": "0.01 /step", "length": "20 steps", "factor": 3.0}
    assert "intra" not in data
    assert decode(data, Cluster, "") == cluster
