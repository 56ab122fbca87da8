"""Leg: one strategy for a number of steps of a living launch."""

from dataclasses import dataclass, field
from typing import Literal

from fleetbench.config import Config
from fleetbench.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg(Config):
    """Next task of a launch's ranks: steps under one strategy."""

    strategy: DistributedStrategy = field(default_factory=DistributedStrategy)
    steps: int
    """Number of counted steps."""
    warmup_steps: int = 5
    """Number of steps before step 1, trained but not counted."""
    start: Literal["continue", "initial", "as_is"] = "continue"
    """Start of the leg: the current state of training (for step times), or the initial parameters, optimizer
    and data order. ``as_is`` runs a user's script under its own strategy, ignoring ``strategy``, and reports
    the script's facts."""
    seed: int | None = None
    """Seed of the initial parameters and of the data's order, but not of the data's split, in a leg with
    ``start = "initial"``. ``None``: the experiment's seed. A user's script finds it in ``FLEETBENCH_SEED``."""
    evaluate: bool = False
    """Whether to copy the parameters every ``workload.eval_every`` steps and look for the target."""
    ends_at_target: bool = False
    """Whether a leg with ``evaluate`` evaluates during its steps, and ends once it has confirmed that it reached
    the target. Legs with a script, parameter servers, fragments or emulated compute always make all their steps."""
    window: int = 0
    """Index n of the injected stragglers: those of the n-th run of ``warmup_steps + steps`` steps. Compared
    legs share it."""
    record: bool = False
    """Whether to keep every rank's events and operations."""
    profile: bool = False
    """Whether to measure layer times instead: no exchange, no injected stragglers; ``steps`` is then a
    maximum."""
    max_s: float = 10.0
    """Seconds in which layer times are measured: fewer steps are made if they would take longer, but at least
    three."""
    endpoints: tuple[str, ...] = ()
    """Addresses ``host:port`` of all parameter servers; a session sets them."""
