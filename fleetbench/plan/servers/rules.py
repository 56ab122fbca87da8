"""Rules of parameter servers: the mode of a job, its bounds, and which server holds which parameters."""

import math
from dataclasses import dataclass
from typing import Literal

from fleetbench.config import Config
from fleetbench.errors import ConfigError
from fleetbench.fields import named
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import refuse_unexecuted

Mode = Literal["synchronous", "asynchronous", "geo_sgd"]

CHOSEN_K = 800
"""K of GeoSGD if ``k_steps = -1`` and Fleet's rule chooses GeoSGD."""
COPIES = 5
"""Number of copies of the parameters that must fit in a trainer's memory for Fleet's rule to choose GeoSGD."""
WAIT_NS = 10_000_000
"""Time in ns between Fleet's checks of an empty queue. After ``send_wait_times`` such checks a trainer is
idle."""

SERVED = named("servers")
"""Dotted names of the strategy's fields that training with parameter servers carries out; changes to others
are refused."""


def refuse_unserved(strategy: DistributedStrategy) -> None:
    """Raise ``ConfigError`` if a field that parameter servers do not support is changed."""
    hint = f'leave it at its default, or set mode = "{DistributedStrategy().mode}": no executor has it with mode = "ps"'
    refuse_unexecuted(strategy, "strategy", SERVED, "training with parameter servers", hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRules(Config):
    """Rules that the three roles of a job share. The defaults are Fleet's.

    A *gradient* is the gradient of one step. In GeoSGD a trainer sends its sender no gradients but records
    its steps; bounds on gradients then apply to recorded steps.
    """

    mode: Mode
    """Mode of training."""
    trainers: int
    """Number of trainers."""
    servers: int
    """Number of servers."""
    k_steps: int = 0
    """Largest number of steps between two exchanges in GeoSGD."""
    max_merge: int = 1
    """Largest number of gradients summed into a push."""
    queue_size: int = 16
    """Number of gradients in the sender's queue at which the trainer waits. GeoSGD uses ``k_steps`` instead."""
    pushes_in_flight: int = 1
    """Largest number of pushes that not all servers have acknowledged."""
    idle_ns: int = WAIT_NS
    """Time in ns without a step after which a trainer is idle and its sender sends all waiting gradients."""
    independent_receive: bool = False
    """Whether pulls overlap pushes. If false, a pull waits for earlier pushes, and pushes wait for the
    pull."""
    sends_before_receive: int = 1
    """Number of gradients pushed between two pulls of dense parameters."""
    has_dense: bool = True
    """Whether the model has dense parameters, which are pulled whole; rows of embeddings are pulled when they
    are looked up."""

    @property
    def room(self) -> int:
        """Number of waiting gradients or recorded steps at which the trainer waits."""
        return self.k_steps if self.mode == "geo_sgd" else self.queue_size

    @property
    def readers(self) -> int:
        """Number of trainers that pull the rows which others have changed: all in GeoSGD, none in other modes."""
        return self.trainers if self.mode == "geo_sgd" else 0


def choice(strategy: DistributedStrategy, rules: ServerRules) -> str | None:
    """Return a sentence on the mode that ``k_steps = -1`` has chosen; None if the strategy names the mode itself."""
    if not strategy.a_sync or strategy.a_sync_configs.k_steps >= 0:
        return None
    mode = f"GeoSGD with k_steps = {rules.k_steps}" if rules.mode == "geo_sgd" else "asynchronous"
    return f"a_sync_configs.k_steps = -1: {mode}; GeoSGD is for SGD whose parameters fit {COPIES} times in memory"


def early_exchanges(rules: ServerRules, step_s: float) -> tuple[str, str] | None:
    """Return the field of a bound that idle trainers do not wait for, and the reason; None if there is no such bound.

    ``step_s`` is the time per step in seconds.
    """
    name, most = ("k_steps", rules.k_steps) if rules.mode == "geo_sgd" else ("max_merge_var_num", rules.max_merge)
    if rules.mode == "synchronous" or most <= 1 or step_s * 1e9 <= rules.idle_ns:
        return None
    why = (
        f"at most {most} steps between two exchanges, and fewer if the link is fast enough: a step takes {1e3 * step_s:.3g} ms, and a "
        f"trainer is idle after {rules.idle_ns * 1e-6:.3g} ms (send_wait_times = {rules.idle_ns // WAIT_NS}) and sends what it has; "
        f"send_wait_times = {math.ceil(1.5e9 * step_s / WAIT_NS)} keeps {most}"
    )
    return f"strategy.a_sync_configs.{name}", why


def rules_of(
    strategy: DistributedStrategy,
    trainers: int,
    servers: int,
    *,
    optimizer: str,
    parameter_bytes: int = 0,
    memory_bytes: int | None = None,
    has_dense: bool = True,
) -> ServerRules:
    """Return the rules of a strategy with ``mode = "ps"``.

    ``optimizer`` is sgd, momentum, adagrad, adam or sparse_adam. ``memory_bytes`` is what a trainer may use,
    or None if unknown. With ``k_steps = -1``, GeoSGD is chosen for SGD unless five times the parameters
    exceed it. Raises ``ConfigError`` for a strategy or an optimizer that servers do not support.
    """
    if strategy.mode != "ps":
        raise ConfigError("is no strategy of parameter servers", "strategy.mode", repr(strategy.mode), 'set mode = "ps"')
    refuse_unserved(strategy)
    if servers < 1:
        raise ConfigError('mode = "ps" needs servers', "servers", str(servers), "fleetbench launch --servers 1 --workers 2 train.py")
    configs = strategy.a_sync_configs
    k_steps = configs.k_steps
    if strategy.a_sync and k_steps < 0:
        fits = memory_bytes is None or COPIES * parameter_bytes <= memory_bytes
        k_steps = CHOSEN_K if optimizer == "sgd" and fits else 0
    mode: Mode = "synchronous" if not strategy.a_sync else "geo_sgd" if k_steps > 0 else "asynchronous"
    if mode == "geo_sgd" and optimizer != "sgd":
        what = "GeoSGD adds up the changes of trainers' own steps, which is correct only for SGD"
        raise ConfigError(what, "optimizer", repr(optimizer), "use SGD without momentum, or a_sync_configs.k_steps = 0")
    return ServerRules(
        mode=mode,
        trainers=trainers,
        servers=servers,
        k_steps=max(0, k_steps),
        max_merge=configs.max_merge_var_num,
        queue_size=configs.send_queue_size,
        pushes_in_flight=configs.thread_pool_size,
        idle_ns=configs.send_wait_times * WAIT_NS,
        independent_receive=configs.independent_recv_thread,
        sends_before_receive=configs.min_send_grad_num_before_recv,
        has_dense=has_dense,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Config):
    """An embedding: ``rows`` vectors of ``width`` numbers."""

    name: str
    rows: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards(Config):
    """Distribution of a model's parameters over ``servers`` servers.

    Dense parameters are one vector in the model's order, split into balanced ranges; embeddings are split by
    row.
    """

    servers: int
    dense: int
    """Number of elements in the dense vector."""
    tables: tuple[Table, ...] = ()

    def dense_part(self, server: int) -> slice:
        """Return a server's part of the dense vector; parts differ by at most one element."""
        return slice(server * self.dense // self.servers, (server + 1) * self.dense // self.servers)

    def num_rows(self, table: int, server: int) -> int:
        """Return the number of a table's rows on a server: row r is row r // servers of server r % servers."""
        return (self.tables[table].rows - server + self.servers - 1) // self.servers
