"""Experiment = Workload + Cluster + DistributedStrategy + Run: one file, one run.

Each part validates itself; what needs two of them is checked here.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

import tomli_w

from fleetbench import hugging_face
from fleetbench.cluster import Cluster
from fleetbench.collective_logs import with_measured
from fleetbench.config import Config, at_least, decode, defaults_of, encode
from fleetbench.digests import digest_of, json_digest, read_text, read_toml, sealed, write_whole
from fleetbench.environment import check_environment
from fleetbench.errors import ConfigError
from fleetbench.fields import PARAMETERS, SEARCHES
from fleetbench.hardware.presets import expanded
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy, check_hierarchy
from fleetbench.workload import LAYERS, LINEAR_OPTIMIZERS, Workload

SCHEMA = 1

LONGEST_NAME = 128
"""Bytes of an experiment's name. Names of folders add to it, and file systems take 255."""

_FILE_DATA = ("text:", "imagenet:")


class HierarchySwitchedOff(UserWarning):
    """A hierarchical all-reduce was asked for, and all trainers are of one node, or of one group of ``hierarchical_inner_ranks``."""


def _searched(cls: type) -> type:
    """The class with a key for each list of values that the strategy's fields have to search."""
    for key, (_, knob) in SEARCHES.items():
        first = knob.values[0]
        kind = f"Literal{[*knob.values]}" if isinstance(first, str) else type(first).__name__
        cls.__annotations__.setdefault(key, f"tuple[{kind}, ...]")
        setattr(cls, key, knob.values)
    return cls


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePoint(Config):
    """Runs to the target at one batch size, with the learning rate that suits it."""

    batch_size: int
    """Samples of an update, of all trainers together."""
    samples: float
    """Mean number of samples to the target."""
    runs: int = 1
    """Number of runs, of different seeds."""
    sd: float | None = None
    """Standard deviation of ``samples`` from run to run."""

    def _validate(self) -> None:
        at_least(self, 1, "batch_size", "runs")
        at_least(self, 0, "samples", above=True)
        at_least(self, 0, "sd")


@dataclass(frozen=True, slots=True, kw_only=True)
@_searched
class Tune(Config):
    """How ``fleetbench tune`` searches, and how it decides."""

    trials: int = 150
    """Simulated trials, the default strategy among them, where all different strategies would take more than ``search_seconds``."""
    search_seconds: float = 30.0
    """All different strategies are simulated if that takes no longer; otherwise Optuna's TPE proposes. As long again virtual trainers may
    take, if there is a target, and once more with further seeds; with ``--simulate-only`` that for each of ``target_seeds``."""
    allow: tuple[Literal["wire16"], ...] = ()
    """``wire16``: gradients may travel as FP16 or BF16, without a target as well."""
    simulated_steps: int = 10
    """Least counted steps of one simulated trial: whole rounds of all K, or the workload's if fewer."""
    finalists: int = 3
    """Best simulated strategies that run for real."""
    leg_steps: int = 60
    """Counted steps of one real leg; more where a K that is searched has longer rounds."""
    pairs: int = 48
    """Most fresh pairs of finalist and default; they stop at a look before, where the verdict is known."""
    target_seeds: int | None = None
    """Most runs to ``workload.target_loss`` of each way of training, paired by their seeds, as far as a budget has room; with
    ``--simulate-only`` of virtual trainers. With fewer than 5 no way of training is used. A script takes its seed from
    ``FLEETBENCH_SEED``. Default: 5; 1 where compute is emulated."""
    metric: str | None = None
    """With a target: what must not fall. ``accuracy`` of the registry's classifiers, or the name of what a script reports beside its loss,
    ``fleet.report(loss=loss, NAME=value)``; at the target, in the mean over seeds. More is better."""
    metric_drop: float = 0.01
    """By how much the finalist's ``metric`` may be less than the default's."""
    min_gain: float = 0.02
    """USE needs the interval's lower end above 1 + ``min_gain``."""
    budget_gpu_hours: float | None = None
    """Bound on the trainers' time in real runs, summed over them."""
    budget_minutes: float | None = None
    """Bound on the time of the real runs: the pairs then end with the verdict that they allow."""
    samples: float | None = None
    """With ``--simulate-only``: samples to train on in all, for days and money."""
    price_per_trainer_hour: float | None = None
    """Of one trainer, in any currency; servers are not counted."""
    reference_points: tuple[ReferencePoint, ...] = ()
    """With ``--simulate-only --sweep``: runs to the target at one batch size or several, by which a law says how many samples any takes."""
    local_steps: tuple[int, ...] = SEARCHES["local_steps"][1].values
    """Values of K that may be searched; used only where ``workload.target_loss`` prices them."""
    diloco: bool = True
    """Rounds of local steps may end with a step of DiLoCo's outer optimizer (Nesterov, rate 0.7, momentum 0.9); tried with a target, where
    virtual trainers train the workload, and in scripts with the fastest K and the next larger one (twice the largest). Virtual trainers
    also try the best local steps with an outer rate of 0.4 and 1, momentum 0.5, two fragments, and exchanges beside a step."""
    adaptive: bool = True
    """Adaptive K from the largest of ``local_steps``, and local steps from ``workload.lr_decay``'s first on, may be tried, where virtual
    trainers train the workload, with a target."""
    gradient_merge: tuple[int, ...] = (1, 2, 4)
    """Micro-batches of an update that may be tried beside 1, where virtual trainers train the workload, with a target."""
    sharding: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
    """With ``--simulate-only``: stages of sharding that are tried, over all trainers and within a node."""
    lr_scale: tuple[float, ...] = ()
    """Factors of the learning rate that may be tried with a target. Where virtual trainers train the workload, none stands for an eighth to
    eight: with the default and the best ``finalists`` ways, step by step from the strategy's own, as far as that helps. A script tries none
    but those that stand here, with the default and the fastest K: each costs runs to the target."""

    def _validate(self) -> None:
        at_least(self, 1, "trials", "simulated_steps", "finalists", "leg_steps", "target_seeds")
        at_least(self, 2, "pairs")
        at_least(self, 0, "min_gain", "metric_drop", "search_seconds")
        at_least(self, 0, "budget_gpu_hours", "budget_minutes", "samples", "price_per_trainer_hour", above=True)
        self._check_values()
        DistributedStrategy(nccl_comm_num=max(self.values("nccl_comm_num")))

    def _check_values(self) -> None:
        """Raise ``ConfigError`` for a parameter without a value that could be tried."""
        if min(self.lr_scale, default=1.0) <= 0:
            raise ConfigError("needs values above 0", "lr_scale", f"{list(self.lr_scale)}", "for example lr_scale = [0.5, 2]")
        for key, parameter in {**PARAMETERS, "gradient_merge": "gradient_merge"}.items():
            values, examples = getattr(self, key), defaults_of(type(self))[key]  # type: ignore[arg-type]  # classes are hashable
            if not self.values(parameter) or any(type(value) is int and value < 1 for value in values):
                what = "needs at least one value, whole numbers from 1"
                raise ConfigError(what, key, repr(values), f"for example {key} = {json.dumps(examples)}")

    def values(self, parameter: str) -> tuple[Any, ...]:
        """All that may be tried of a parameter of the search, in whichever of its keys."""
        keys = [key for key, of in PARAMETERS.items() if of == parameter] or [parameter]
        return tuple(dict.fromkeys(value for key in keys for value in getattr(self, key)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Config):
    """Where and how the experiment is executed."""

    seed: int = 0
    device: Literal["cpu", "cuda", "emulated"] = "cpu"
    backend: Literal["gloo", "nccl"] = "gloo"
    launcher: Literal["local", "testbed", "torchrun", "slurm", "command"] = "local"
    """``command``: the user's own, after ``--`` on the command line; it is in no file, because a file executes nothing."""
    port: int = 29500
    """Rendezvous port of a job that ``fleetbench launch --print`` prints."""
    warmup_steps: int = 5
    """Steps before step 1, numbered up to 0: trained, in the table, not in the summary."""
    startup_timeout: Nanoseconds = Nanoseconds(300 * 10**9)
    """Until every rank has joined."""
    timeout: Nanoseconds = Nanoseconds(120 * 10**9)
    """Of a collective, once all ranks have joined."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set before the workers start; recorded in the manifest. ``fleetbench.environment`` lists the names and what they may hold."""

    def _validate(self) -> None:
        at_least(self, 0, "seed", "warmup_steps")
        at_least(self, 1, "port", most=65535)
        at_least(self, 10**9, "timeout", "startup_timeout")
        check_environment(self.environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Config):
    """One experiment file, checked. Raises ``ConfigError`` where its parts contradict each other."""

    name: str = "quickstart"
    schema: int = SCHEMA
    workload: Workload = field(default_factory=Workload)
    cluster: Cluster = field(default_factory=Cluster)
    strategy: DistributedStrategy = field(default_factory=DistributedStrategy)
    tune: Tune = field(default_factory=Tune)
    run: Run = field(default_factory=Run)

    def _validate(self) -> None:
        if not re.fullmatch(r"\w[\w.-]*", self.name) or len(self.name.encode()) > LONGEST_NAME:
            what = f"names a folder: letters, digits, '-', '_' and '.', not '-' or '.' first, at most {LONGEST_NAME} bytes"
            raise ConfigError(what, "name", repr(self.name), 'for example name = "quickstart"')
        inner, trainers = self.strategy.hierarchical_inner_ranks, self.cluster.trainers
        if self.strategy.use_hierarchical_allreduce and (self.cluster.nodes == 1 or inner == trainers):
            one = "one node" if self.cluster.nodes == 1 else f"one group of hierarchical_inner_ranks = {inner}"
            warnings.warn(f"{one} has no hierarchy: use_hierarchical_allreduce is switched off", HierarchySwitchedOff, stacklevel=2)
            object.__setattr__(self, "strategy", self.strategy.without("use_hierarchical_allreduce"))
        check_strategy(self.strategy, self.workload, self.cluster)
        if self.run.backend == "nccl" and self.run.device != "cuda":
            raise ConfigError("NCCL moves CUDA tensors only", "run.backend", "'nccl'", 'set run.device = "cuda", or backend = "gloo"')

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Experiment:
        """Decode plain TOML data.

        ``cluster.preset`` stands for fields (``fleetbench.hardware.presets``), and a ``config.json`` as ``workload.model``
        for a model with its options (``fleetbench.hugging_face``), a log in ``cluster.measured`` for its points.
        """
        if (schema := data.get("schema", SCHEMA)) != SCHEMA:  # before its keys, which another schema may name otherwise
            raise ConfigError("not a schema of this version", "schema", repr(schema), f"this version reads schema {SCHEMA}")
        return decode(expanded(hugging_face.expanded(with_measured(data))), cls, "")

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> Experiment:
        """Read an experiment file (default: the built-in quickstart), then ``section.key=value`` overrides.

        Files named in it are taken relative to it, those of overrides relative to the working directory.
        """
        return cls.from_dict(cls.read(path, overrides))

    @staticmethod
    def read(path: str | Path | None = None, overrides: Sequence[str] = (), strategy: Path | None = None) -> dict[str, Any]:
        """What ``load`` decodes, as plain TOML data; with the strategy of another file, if one is given."""
        if path is None:
            text, base = resources.files("fleetbench").joinpath("quickstart.toml").read_text(encoding="utf-8"), Path()
        else:
            text, base = read_text(path, "check the path; without a file the built-in quickstart runs"), Path(path).parent
        data = read_toml(
            text, str(path), "an experiment is a TOML file, and a script's command follows `--`; `fleetbench sim` alone runs one"
        )
        if not data:
            hint = "without a file the built-in quickstart runs; a file holds tables such as [workload]"
            raise ConfigError("holds no experiment", str(path), hint=hint)
        if path is not None and data.keys() <= {"schema", "strategy", *(one.name for one in dataclasses.fields(DistributedStrategy))}:
            hint = f"name its experiment, too: fleetbench sim EXPERIMENT.toml --strategy {path}"
            raise ConfigError("holds a strategy, and no experiment", str(path), hint=hint)
        if strategy is not None:
            data["strategy"] = encode(DistributedStrategy.load(strategy))
        _make_paths_absolute(data, base)
        for override in overrides:
            apply_override(data, override)
        _make_paths_absolute(data, Path())
        return data

    def to_toml(self) -> str:
        """The experiment as TOML, defaults included."""
        return tomli_w.dumps(encode(self))

    def save(self, path: Path) -> None:
        """Write ``to_toml`` below its digest, whole or not at all."""
        write_whole(path, sealed(self.to_toml()))

    @property
    def transport(self) -> str:
        """Whose framing links have where they declare none: ``run.backend``, or NCCL where the simulated collectives are NCCL's."""
        return "nccl" if self.cluster.collective.startswith("nccl-") else self.run.backend

    def replace(self, **changes: Any) -> Self:
        """A copy with some parts changed."""
        return dataclasses.replace(self, **changes)

    def digest(self) -> str:
        """Eight hexadecimal digits over the experiment and the contents of the files it names.

        Where a file lies does not count. Raises ``ConfigError`` for one that cannot be read.
        """
        data = encode(self)
        _replace_files(data, lambda path: digest_of(path, "the experiment names this file"))
        return json_digest(data)[:8]


def check_strategy(strategy: DistributedStrategy, workload: Workload, cluster: Cluster) -> None:
    """Raise ``ConfigError`` where a strategy does not fit the workload or the cluster."""
    if strategy.needs_linear_optimizer and workload.optimizer not in LINEAR_OPTIMIZERS:
        what = "averaging parameters after every update (k_steps = 1) is not a step of averages for this optimizer"
        hint = 'use sgd or momentum, raise k_steps, or set localsgd_configs.optimizer_state = "average"'
        raise ConfigError(what, "workload.optimizer", repr(workload.optimizer), hint)
    if strategy.follows_loss and workload.model == LAYERS and workload.loss_curve is None:
        hint = "declare workload.loss_curve, or use localsgd with a fixed localsgd_configs.k_steps"
        raise ConfigError("adaptive steps follow a loss, and a table of layers has none", "strategy.adaptive_localsgd", "true", hint)
    if strategy.use_hierarchical_allreduce:
        if not strategy.hierarchical_inner_ranks:
            cluster.require_even("the groups of a hierarchy are nodes with as many trainers each, unless hierarchical_inner_ranks is set")
        check_hierarchy(cluster.trainers, strategy.hierarchical_inner_ranks or cluster.trainers_per_node)
    if strategy.mode == "ps" and cluster.servers < 1:
        raise ConfigError('mode = "ps" needs servers', "cluster.servers", repr(cluster.servers), "set cluster.servers to 1 or more")


def apply_override(data: dict[str, Any], override: str) -> None:
    """Apply ``section.key=value``; the value is TOML, or else plain text."""
    key, separator, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not separator or not all(parts):
        raise ConfigError("not an override", "--set", repr(override), "--set workload.batch_size=64")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # also a number of five thousand digits
        value = text
    table = data
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError("is not a table", f"--set {key}", repr(table), f"{part} holds a value, so it has no keys to set")
    table[parts[-1]] = value


def _make_paths_absolute(data: dict[str, Any], base: Path) -> None:
    _replace_files(data, lambda path: path if "\0" in path else str((base / path).resolve()), folders=True)


def _replace_files(data: dict[str, Any], change: Callable[[str], str], *, folders: bool = False) -> None:
    """Replace the names of files (and of folders) in undecoded data by ``change`` of them."""
    workload, cluster = (table if isinstance(table := data.get(name), dict) else {} for name in ("workload", "cluster"))
    entries = cluster.get("stragglers")
    named = [(entry, "path") for entry in (entries if isinstance(entries, list) else ()) if isinstance(entry, dict)]
    models = [(workload, "model")] if str(workload.get("model")).endswith(".json") else []
    for table, key in ((workload, "profile"), *models, *named):
        if isinstance(table.get(key), str):
            table[key] = change(table[key])
    if isinstance(logs := cluster.get("measured"), str | list):
        named_logs = logs if isinstance(logs, list) else [logs]
        cluster["measured"] = [change(one) if isinstance(one, str) else one for one in named_logs]
    prefix, colon, path = str(workload.get("data")).partition(":")
    if prefix + colon in _FILE_DATA and (folders or prefix != "imagenet"):
        workload["data"] = prefix + colon + change(path)
