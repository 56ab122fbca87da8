"""Leg: one strategy for so many steps of a living launch."""

from dataclasses import dataclass, field
from typing import Literal

from fleetbench.config import Config
from fleetbench.strategy import DistributedStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg(Config):
    """What the workers of a launch do next."""

    strategy: DistributedStrategy = field(default_factory=DistributedStrategy)
    steps: int
    """Counted steps."""
    warmup_steps: int = 5
    """Steps before step 1, trained and not counted."""
    start: Literal["continue", "initial", "as_is"] = "continue"
    """From where training is (for step times), or from the initial parameters, optimizer and data order; ``as_is``: a user's script under
    the strategy of its own, whatever ``strategy`` says, which also tells what the script is."""
    seed: int | None = None
    """Of a leg from the initial parameters: of these and of the order of the data, which are split as ever; the experiment's, if none.
    A user's script finds it in ``FLEETBENCH_SEED``."""
    evaluate: bool = False
    """Snapshot the parameters every ``workload.eval_every`` steps and look for the target."""
    ends_at_target: bool = False
    """Of an evaluated leg: evaluate during it, and end where the target's crossing is confirmed. Legs of a script, of servers, of fragments
    and of emulated compute train on."""
    window: int = 0
    """Which injected stragglers: those of the n-th run of ``warmup_steps + steps`` steps. Legs that are compared share it."""
    record: bool = False
    """Keep every rank's events and operations."""
    profile: bool = False
    """Measure layer times instead: no exchange, no injected stragglers; steps are then the most of their kind."""
    max_s: float = 10.0
    """While measuring layer times: take fewer steps where all of them would last longer, but three at least."""
    endpoints: tuple[str, ...] = ()
    """``host:port`` of every parameter server; a session fills it in."""
