"""Experiment = Workload + Cluster + DistributedStrategy + Run: one file, one run.

Each part validates itself. Conditions that involve two parts are checked here.
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
from fleetbench.churn import with_trace
from fleetbench.cluster import Cluster
from fleetbench.collective_logs import with_measured
from fleetbench.config import Config, at_least, decode, defaults_of, encode
from fleetbench.digests import digest_of, json_digest, read_text, read_toml, write_whole
from fleetbench.environment import check_environment
from fleetbench.errors import ConfigError
from fleetbench.exclusions import check_hierarchy, check_workers
from fleetbench.fields import PARAMETERS, SEARCHES
from fleetbench.hardware.presets import expanded
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LAYERS, LINEAR_OPTIMIZERS, Workload

SCHEMA = 1

LONGEST_NAME = 128
"""Largest length of an experiment's name, in bytes. Names of run folders add to it, and file systems allow
255."""

_FILE_DATA = ("text:", "imagenet:")


class HierarchySwitchedOff(UserWarning):
    """Warns that hierarchical all-reduce is switched off: there is only one node, or one inner group."""


def _searched(cls: type) -> type:
    """Add a field to the class for each list of values that the tuner searches, and return the class."""
    for key, (_, knob) in SEARCHES.items():
        first = knob.values[0]
        kind = f"Literal{[*knob.values]}" if isinstance(first, str) else type(first).__name__
        cls.__annotations__.setdefault(key, f"tuple[{kind}, ...]")
        setattr(cls, key, knob.values)
    return cls


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePoint(Config):
    """Runs to the target at one batch size, with a learning rate that suits it."""

    batch_size: int
    """Samples per update, over all trainers."""
    samples: float
    """Mean number of samples until the target is reached."""
    runs: int = 1
    """Number of runs, each with a different seed."""
    sd: float | None = None
    """Standard deviation of ``samples`` between runs."""

    def _validate(self) -> None:
        at_least(self, 1, "batch_size", "runs")
        at_least(self, 0, "samples", above=True)
        at_least(self, 0, "sd")


@dataclass(frozen=True, slots=True, kw_only=True)
@_searched
class Tune(Config):
    """How ``fleetbench tune`` searches, and how it decides."""

    trials: int = 150
    """Number of simulated trials, including the default strategy. It applies only if all different strategies
    cannot be simulated in ``search_seconds``, or if ``storage`` is set."""
    search_seconds: float = 30.0
    """Seconds of one core for the search, however many cores simulate. If one core can simulate all different
    strategies in them, all are simulated; otherwise Optuna's TPE proposes trials. With a target, virtual
    trainers may take as many, too, and once more for further seeds; with ``--simulate-only``, once for each
    of ``target_seeds``."""
    allow: tuple[Literal["wire16"], ...] = ()
    """Values that need permission. ``wire16``: gradients may be sent as FP16 or BF16 even without a
    target."""
    simulated_steps: int = 10
    """Least number of counted steps in a simulated trial, at most the workload's own. It is rounded up to whole
    rounds of all K. Without stragglers, 3 steps are enough for collective training."""
    finalists: int = 3
    """Number of best simulated strategies that run for real."""
    leg_steps: int = 60
    """Number of counted steps in a real leg, that is, one measured run; more if a searched K has longer
    rounds."""
    leg_seconds: float | None = None
    """Longest compute of a leg in seconds, according to the profile. ``leg_steps`` is halved until they
    fit, but not below 15. Default: no limit."""
    pairs: int = 48
    """Largest number of pairs of finalist and default. Measuring stops earlier, at an interim look, if the
    verdict is already known."""
    target_seeds: int | None = None
    """Largest number of runs to ``workload.target_loss`` for each way of training, paired by seed, within the
    budget; with ``--simulate-only``, runs of virtual trainers. With fewer than 5, no way of training is
    recommended. A script reads its seed from ``FLEETBENCH_SEED``. Default: 5; 1 if compute is emulated."""
    metric: str | None = None
    """With a target: metric that must not fall. ``accuracy`` for the registry's classifiers, or the name of a
    value that a script reports beside its loss, ``fleet.report(loss=loss, NAME=value)``. It is compared at
    the target, as a mean over seeds; more is better."""
    metric_drop: float = 0.01
    """Largest allowed drop of ``metric`` from the default to the finalist."""
    min_gain: float = 0.02
    """Least gain. USE requires that the lower end of the speed-up's interval exceeds 1 + ``min_gain``."""
    budget_gpu_hours: float | None = None
    """Limit on the trainers' time in real runs, in hours summed over trainers."""
    budget_minutes: float | None = None
    """Limit on the time of the real runs, in minutes. When it is reached, the pairs measured so far decide
    the verdict."""
    samples: float | None = None
    """With ``--simulate-only``: total number of training samples, from which days and cost are computed."""
    price_per_trainer_hour: float | None = None
    """Price of one trainer per hour, in any currency; servers are not counted."""
    reference_points: tuple[ReferencePoint, ...] = ()
    """With ``--simulate-only --sweep``: runs to the target at one or more batch sizes. A law fitted to them
    predicts the samples to the target at any batch size."""
    local_steps: tuple[int, ...] = SEARCHES["local_steps"][1].values
    """Values of K that may be searched; only used if ``workload.target_loss`` is set."""
    diloco: bool = True
    """Allow rounds that end with a step of DiLoCo's outer optimizer (Nesterov, rate 0.7, momentum 0.9). It
    needs a target, and is tried where virtual trainers train the workload, and in scripts with the fastest K
    and the next larger one (twice the largest). Virtual trainers also try the best local steps with an outer
    rate of 0.4 and 1, momentum 0.5, two fragments, and exchanges that overlap a step."""
    gradient_merge: tuple[int, ...] = (1, 2, 4)
    """With a target, where virtual trainers train the workload: numbers of micro-batches per update that may be
    tried besides 1."""
    sharding: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
    """With ``--simulate-only``: stages of sharding to try, over all trainers and within a node."""
    storage: str | None = None
    """Where a search keeps its trials, so that commands on several machines share them: a journal's path on a
    shared disk, or the URL of a database without its password, such as ``postgresql://host/studies``. If set,
    Optuna always proposes the trials. Default: a journal of its own in ``studies`` below ``--out``."""
    lr_scale: tuple[float, ...] = ()
    """Factors on the learning rate that may be tried with a target. If empty, and virtual trainers train the
    workload, factors from an eighth to eight are tried with the default and the best ``finalists`` ways of
    training, stepwise from the strategy's own, as long as the result improves. A script tries only the
    factors listed here, with the default and the fastest K, because each costs runs to the target."""

    def _validate(self) -> None:
        at_least(self, 1, "trials", "simulated_steps", "finalists", "leg_steps", "target_seeds")
        at_least(self, 2, "pairs")
        at_least(self, 0, "min_gain", "metric_drop", "search_seconds")
        at_least(self, 0, "leg_seconds", "budget_gpu_hours", "budget_minutes", "samples", "price_per_trainer_hour", above=True)
        self._check_values()
        if "://" in (self.storage or ""):
            self._check_url(str(self.storage))
        DistributedStrategy(nccl_comm_num=max(self.values("nccl_comm_num")))

    def _check_values(self) -> None:
        """Raise ``ConfigError`` for a parameter that has no valid value to try."""
        if min(self.lr_scale, default=1.0) <= 0:
            raise ConfigError("needs values above 0", "lr_scale", f"{list(self.lr_scale)}", "for example lr_scale = [0.5, 2]")
        for key, parameter in {**PARAMETERS, "gradient_merge": "gradient_merge"}.items():
            values, examples = getattr(self, key), defaults_of(type(self))[key]  # type: ignore[arg-type]  # classes are hashable
            if not self.values(parameter) or any(type(value) is int and value < 1 for value in values):
                what = "needs at least one value, whole numbers from 1"
                raise ConfigError(what, key, repr(values), f"for example {key} = {json.dumps(examples)}")

    def _check_url(self, url: str) -> None:
        """Raise ``ConfigError`` for a URL that loads something besides a driver, or that run folders may not show."""
        example = 'for example storage = "postgresql://host/studies", with the password where the driver looks for it'
        if not re.match(r"(sqlite|postgresql|mysql)(\+\w+)?://", url):
            raise ConfigError("is no database of SQLite, PostgreSQL or MySQL", "storage", repr(url.partition("://")[0]), example)
        if re.match(r"[^/]*//[^:/]*:[^@]*@|.*[?&]\w*passw(or)?d=", url):
            raise ConfigError("names a password, which run folders would show", "storage", hint=example)

    def values(self, parameter: str) -> tuple[Any, ...]:
        """Return all values that may be tried for a parameter of the search, from all of its keys."""
        keys = [key for key, of in PARAMETERS.items() if of == parameter] or [parameter]
        return tuple(dict.fromkeys(value for key in keys for value in getattr(self, key)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Config):
    """Where and how the experiment is executed."""

    seed: int = 0
    """Seed of all draws: data, initial parameters, stragglers."""
    device: Literal["cpu", "cuda", "emulated"] = "cpu"
    """Device that trainers compute on. With ``emulated``, they sleep for the measured layer times instead of
    computing."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """Communication library: gloo for CPU tensors, NCCL for CUDA tensors."""
    launcher: Literal["local", "testbed", "torchrun", "slurm", "command"] = "local"
    """Launcher of the worker processes. ``command``: the user's own command, given after ``--`` on the
    command line. No file contains the command, because files never execute anything."""
    port: int = 29500
    """Rendezvous port in the job scripts that ``fleetbench launch --print`` prints."""
    warmup_steps: int = 5
    """Number of steps before step 1, numbered up to 0. They train and appear in the table of steps, but not
    in the summary."""
    startup_timeout: Nanoseconds = Nanoseconds(300 * 10**9)
    """Time limit for all ranks to join."""
    timeout: Nanoseconds = Nanoseconds(120 * 10**9)
    """Time limit of a collective after all ranks have joined."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that are set before the workers start and recorded in the manifest.
    ``fleetbench.environment`` lists the allowed names and values."""

    def _validate(self) -> None:
        at_least(self, 0, "seed", "warmup_steps")
        at_least(self, 1, "port", most=65535)
        at_least(self, 10**9, "timeout", "startup_timeout")
        check_environment(self.environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment(Config):
    """One experiment file, checked. Raises ``ConfigError`` if its parts contradict each other."""

    name: str = "quickstart"
    """Name of the experiment, which begins the names of its run folders."""
    schema: int = SCHEMA
    """Version of the file's schema."""
    workload: Workload = field(default_factory=Workload)
    """Model, data and optimizer."""
    cluster: Cluster = field(default_factory=Cluster)
    """Nodes, links and stragglers."""
    strategy: DistributedStrategy = field(default_factory=DistributedStrategy)
    """How trainers exchange gradients or parameters."""
    tune: Tune = field(default_factory=Tune)
    """Search and decision of ``fleetbench tune``."""
    run: Run = field(default_factory=Run)
    """Device, launcher, seed and timeouts."""

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

        Shorthands are expanded first: ``cluster.preset`` to its fields (``fleetbench.hardware.presets``), a
        ``config.json`` as ``workload.model`` to a model with options (``fleetbench.hugging_face``), and a log
        in ``cluster.measured`` to its points, and a file in ``cluster.churn.trace`` to its rows.
        """
        if (schema := data.get("schema", SCHEMA)) != SCHEMA:  # before its keys, which another schema may name differently
            raise ConfigError("not a schema of this version", "schema", repr(schema), f"this version reads schema {SCHEMA}")
        return decode(expanded(hugging_face.expanded(with_trace(with_measured(data)))), cls, "")

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> Experiment:
        """Read an experiment file (default: the built-in quickstart), then apply ``section.key=value``."""
        return cls.from_dict(cls.read(path, overrides))

    @staticmethod
    def read(path: str | Path | None = None, overrides: Sequence[str] = (), strategy: Path | None = None) -> dict[str, Any]:
        """Return the TOML data that ``load`` decodes, with the strategy of another file if one is given."""
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
            raise ConfigError("holds a strategy, not an experiment", str(path), hint=hint)
        if strategy is not None:
            data["strategy"] = encode(DistributedStrategy.load(strategy))
        _make_paths_absolute(data, base)
        for override in overrides:
            apply_override(data, override)
        _make_paths_absolute(data, Path())
        return data

    def to_toml(self) -> str:
        """Return the experiment as TOML, including defaults."""
        return tomli_w.dumps(encode(self))

    def save(self, path: Path) -> None:
        """Write the experiment as TOML, atomically."""
        write_whole(path, self.to_toml())

    @property
    def transport(self) -> str:
        """Backend whose framing applies to links that declare none.

        This is ``run.backend``, or NCCL if the simulated collectives are NCCL's.
        """
        return "nccl" if self.cluster.collective.startswith("nccl-") else self.run.backend

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some parts changed."""
        return dataclasses.replace(self, **changes)

    def digest(self) -> str:
        """Return a digest of eight hexadecimal digits over the experiment and the contents of the files it names.

        The locations of the files do not matter. Raises ``ConfigError`` if one cannot be read.
        """
        data = encode(self)
        data["tune"].pop("storage", None)  # machines that share a study may name it differently
        _replace_files(data, lambda path: digest_of(path, "the experiment names this file"))
        return json_digest(data)[:8]


def check_strategy(strategy: DistributedStrategy, workload: Workload, cluster: Cluster) -> None:
    """Raise ``ConfigError`` if a strategy does not fit the workload or the cluster."""
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
    check_workers(cluster.trainers, strategy.worker_trainers)
    if strategy.mode == "ps" and cluster.servers < 1:
        raise ConfigError('mode = "ps" needs servers', "cluster.servers", repr(cluster.servers), "set cluster.servers to 1 or more")


def apply_override(data: dict[str, Any], override: str) -> None:
    """Apply ``section.key=value`` to undecoded data. The value is TOML, or plain text if it is not TOML."""
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
    def absolute(path: str) -> str:
        return path if "\0" in path else str((base / path).resolve())

    _replace_files(data, absolute, folders=True)
    if "://" not in str(data.get("tune")):
        _replace(data.get("tune"), "storage", absolute)


def _replace_files(data: dict[str, Any], change: Callable[[str], str], *, folders: bool = False) -> None:
    """Replace each file name (and folder name) in undecoded data with ``change(name)``."""
    workload, cluster = (table if isinstance(table := data.get(name), dict) else {} for name in ("workload", "cluster"))
    _replace(workload, "profile", change)
    _replace(cluster.get("churn"), "trace", change)
    if str(workload.get("model")).endswith(".json"):
        _replace(workload, "model", change)
    if isinstance(logs := cluster.get("measured"), str | list):
        cluster["measured"] = [change(one) if isinstance(one, str) else one for one in (logs if isinstance(logs, list) else [logs])]
    prefix, colon, path = str(workload.get("data")).partition(":")
    if prefix + colon in _FILE_DATA and (folders or prefix != "imagenet"):
        workload["data"] = prefix + colon + change(path)


def _replace(table: object, key: str, change: Callable[[str], str]) -> None:
    if isinstance(table, dict) and isinstance(table.get(key), str):
        table[key] = change(table[key])
