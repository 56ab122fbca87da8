"""Experiment = Workload + Cluster + DistributedStrategy + Run: one file, one run.

Each part validates itself; what needs two of them is checked here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import tomli_w

from fleetbench.cluster import Cluster
from fleetbench.config import Config, decode, encode
from fleetbench.errors import ConfigError
from fleetbench.quantities import Nanoseconds
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import LAYERS, Workload

SCHEMA = 1

ALLOWED_ENVIRONMENT = ("NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH_NCCL_", "CUDA_DEVICE_", "PYTHONWARNINGS")
"""Prefixes of the environment variables that an experiment may set for its workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tune(Config):
    """How ``fleetbench tune`` searches, and how it decides."""

    trials: int = 150
    """Simulated trials, the default strategy among them."""
    simulated_steps: int = 200
    """Counted steps of one simulated trial, at most the workload's."""
    finalists: int = 3
    """Best simulated strategies that run for real."""
    leg_steps: int = 60
    """Counted steps of one real leg."""
    pairs: int = 6
    """Fresh pairs of finalist and default behind the verdict."""
    min_gain: float = 0.01
    """USE needs the interval's lower end above 1 + ``min_gain``."""
    storage: str | None = None
    """Optuna storage; default: an SQLite file beside the runs."""
    budget_gpu_hours: float | None = None
    """Bound on the trainers' time in real runs."""
    local_steps: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Values of K that may be searched; used only where ``workload.target_loss`` prices them."""
    fuse_grad_size_in_MB: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    nccl_comm_num: tuple[int, ...] = (1, 2)
    thread_num: tuple[int, ...] = (1, 2)

    def _validate(self) -> None:
        for name in ("trials", "simulated_steps", "finalists", "leg_steps", "pairs"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", name, repr(getattr(self, name)))
        if self.pairs < 2:
            raise ConfigError("an interval needs at least 2 pairs", "pairs", repr(self.pairs))
        for name in ("local_steps", "nccl_comm_num", "thread_num"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ConfigError("needs at least one value, none below 1", name, repr(getattr(self, name)))
        if not self.fuse_grad_size_in_MB or min(self.fuse_grad_size_in_MB) < 0:
            raise ConfigError("needs at least one value, none negative", "fuse_grad_size_in_MB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Config):
    """Where and how the experiment is executed."""

    seed: int = 0
    device: Literal["cpu", "cuda", "emulated"] = "cpu"
    backend: Literal["gloo", "nccl"] = "gloo"
    launcher: Literal["local", "testbed", "torchrun", "slurm"] = "local"
    port: int = 29500
    """Rendezvous port of the ``torchrun`` launcher; ``local`` opens none."""
    warmup_steps: int = 5
    """Steps before step 1, numbered up to 0: trained, in the table, not in the summary."""
    startup_timeout: Nanoseconds = Nanoseconds(300 * 10**9)
    """Until every rank has joined."""
    timeout: Nanoseconds = Nanoseconds(120 * 10**9)
    """Of a collective, once all ranks have joined."""
    environment: dict[str, str] = field(default_factory=dict)
    """Set before the workers start; recorded in the manifest."""

    def _validate(self) -> None:
        if self.seed < 0 or self.warmup_steps < 0:
            raise ConfigError("cannot be negative", "seed, warmup_steps", f"{self.seed}, {self.warmup_steps}")
        if not 1 <= self.port <= 65535:
            raise ConfigError("not a port", "port", repr(self.port), "1 to 65535")
        for name in ("timeout", "startup_timeout"):
            if getattr(self, name) < 10**9:
                raise ConfigError("must be at least 1 s", name, f"{getattr(self, name)} ns")
        for name in self.environment:
            if not name.startswith(ALLOWED_ENVIRONMENT):
                raise ConfigError("may not be set by an experiment", f"environment.{name}", hint=f"allowed: {' '.join(ALLOWED_ENVIRONMENT)}")


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
        if self.schema != SCHEMA:
            raise ConfigError("not a schema of this version", "schema", repr(self.schema), f"this version reads schema {SCHEMA}")
        if not self.name or not self.name.replace("-", "").replace("_", "").replace(".", "").isalnum() or self.name.startswith("."):
            raise ConfigError("names a folder: letters, digits, '-', '_' and '.'", "name", repr(self.name))
        check_strategy(self.strategy, self.workload, self.cluster)
        if self.run.backend == "nccl" and self.run.device != "cuda":
            raise ConfigError("NCCL moves CUDA tensors only", "run.backend", "'nccl'", 'set run.device = "cuda", or backend = "gloo"')

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Experiment:
        """Decode plain TOML data."""
        return decode(data, cls, "")

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Sequence[str] = ()) -> Experiment:
        """Read an experiment file (default: the built-in quickstart), then ``section.key=value`` overrides.

        Files named in it are taken relative to it.
        """
        if path is None:
            text, base = resources.files("fleetbench").joinpath("quickstart.toml").read_text(encoding="utf-8"), Path()
        else:
            text, base = _read(Path(path)), Path(path).parent
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"not TOML: {error}", str(path)) from None
        for override in overrides:
            _override(data, override)
        return cls.from_dict(_absolute_paths(data, base))

    def to_toml(self) -> str:
        """The experiment as TOML, defaults included."""
        return tomli_w.dumps(encode(self))

    def replace(self, **changes: Any) -> Experiment:
        """A copy with some parts changed."""
        return dataclasses.replace(self, **changes)

    def digest(self) -> str:
        """Eight hexadecimal digits over the experiment and the contents of the files it names."""
        digest = hashlib.sha256(self.to_toml().encode())
        for path in (self.workload.profile, self.workload.loss_recording):
            if path is not None:
                digest.update(_read_bytes(Path(path)))
        return digest.hexdigest()[:8]


def check_strategy(strategy: DistributedStrategy, workload: Workload, cluster: Cluster) -> None:
    """Raise ``ConfigError`` where a strategy does not fit the workload or the cluster."""
    local = strategy.localsgd or strategy.adaptive_localsgd
    averaged = strategy.localsgd and strategy.localsgd_configs.optimizer_state == "average"
    if local and workload.optimizer not in ("sgd", "momentum") and not averaged:
        raise ConfigError(
            "Local SGD averages parameters, which is not a step of averages for this optimizer",
            "workload.optimizer",
            repr(workload.optimizer),
            'use sgd or momentum, or set localsgd_configs.optimizer_state = "average"',
        )
    if strategy.adaptive_localsgd and workload.model == LAYERS and workload.loss_curve is None and workload.loss_recording is None:
        raise ConfigError("adaptive steps follow a loss, and a table of layers has none", "strategy.adaptive_localsgd", hint="declare workload.loss_curve")
    if strategy.use_hierarchical_allreduce:
        inner = strategy.hierarchical_inner_ranks or cluster.trainers_per_node
        if inner < 2 or cluster.trainers % inner:
            raise ConfigError(
                f"does not divide the world of {cluster.trainers} trainers into groups of at least 2",
                "strategy.hierarchical_inner_ranks",
                repr(inner),
                "choose a divisor of the world above 1, or switch use_hierarchical_allreduce off",
            )
    if strategy.mode == "ps" and cluster.servers < 1:
        raise ConfigError('mode = "ps" needs servers', "cluster.servers", repr(cluster.servers), "set cluster.servers to 1 or more")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError("not a text file", str(path), hint="an experiment is a TOML file") from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", str(path), hint="check the path; without a file the built-in quickstart runs") from None


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", str(path), hint="the experiment names this file") from None


def _override(data: dict[str, Any], override: str) -> None:
    """Apply ``section.key=value``; the value is TOML, or else plain text."""
    key, separator, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not separator or not all(parts):
        raise ConfigError("not an override", "--set", repr(override), "--set workload.batch_size=64")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = data
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError("is not a table", f"--set {key}", hint=f"{part} holds a value")
    table[parts[-1]] = value


def _absolute_paths(data: dict[str, Any], base: Path) -> dict[str, Any]:
    workload = data.get("workload")
    if isinstance(workload, dict):
        for key in ("profile", "loss_recording"):
            if isinstance(workload.get(key), str):
                workload[key] = str((base / workload[key]).resolve())
    return data
