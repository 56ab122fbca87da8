"""Twin: asynchronous jobs at a speed for millions of pushes, equal to ``sim.servers.job.execute`` to the nanosecond.

It knows jobs whose connections share no link (``Hosts.apart``), with linear costs. Needs numba, an
optional dependency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import pandas as pd

from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.plan.operations import Operation
from fleetbench.quantities import LARGEST
from fleetbench.result import steps_table_of, uncountable
from fleetbench.stragglers import ONE, stretch
from sim.clock import half_up
from sim.servers.costs import Linear
from sim.servers.job import Job
from sim.servers.load import Load
from sim.work import BITS_NS

Integers = npt.NDArray[np.int64]
_SMALL = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinExecution:
    """What the loop saw. Times in ns."""

    starts_ns: Integers
    """Of steps, ``(trainers, steps)``."""
    ends_ns: Integers
    bytes_sent: Integers
    """By a trainer and its sender during each step."""
    pushes: Integers
    """Of every push, in the order in which they were heard: when, server, rank, count of gradients, staleness of the oldest of
    them; ``(pushes, 5)``."""
    loads: Integers
    """Of every server, from the first counted step on, ``(servers, 10)``: since, until, busy, length, longest, integral of the
    length, waited, messages, gradients, sum of their staleness."""
    waits_ns: Integers
    """... of every message, which server's it was and how long it waited; ``(messages, 2)``."""
    staleness: Integers
    """... of every server, gradients by staleness; ``(servers, lags)``."""


def execute_twin(job: Job) -> TwinExecution:
    """Run an asynchronous job. Raises ``ConfigError`` for a job that the twin does not know, ``EnvironmentLacks`` without numba."""
    costs = _checked(job)
    if find_spec("numba") is None:
        raise EnvironmentLacks("numba is not installed", "engine = 'compiled'", hint='pip install numba, or use engine = "reference"')
    from sim.servers import twin_loop as loop  # half a second of imports, and of compiling on the first run

    rules, traffic, hosts = job.rules, job.traffic, job.hosts

    def wire_ns(nbytes: int) -> int:
        return half_up(Fraction(nbytes * BITS_NS, hosts.link.bandwidth))

    def answer_ns(payload: str, nbytes: int) -> int:
        answer = Operation(id=0, kind="send", payload=payload)  # type: ignore[arg-type]  # a payload
        return costs.took_ns("server", 0, answer, nbytes)

    update = Operation(id=0, kind="update")
    nbytes_of = [traffic.push(count) for count in range(rules.max_merge + 1)]
    settings = np.zeros(loop.NUM_SETTINGS, dtype=np.int64)
    for place, value in {
        loop.S_SERVERS: rules.servers,
        loop.S_MAX_MERGE: rules.max_merge,
        loop.S_QUEUE: rules.queue_size,
        loop.S_IN_FLIGHT: rules.pushes_in_flight,
        loop.S_IDLE_NS: rules.idle_ns,
        loop.S_INDEPENDENT: rules.independent_receive,
        loop.S_BEFORE_PULL: rules.sends_before_receive,
        loop.S_DENSE: rules.has_dense,
        loop.S_WAITS: job.waits_each_step,
        loop.S_READ_NS: job.table.read,
        loop.S_LATENCY_NS: hosts.link.latency,
        loop.S_HEADER_NS: wire_ns(traffic.header_bytes),
        loop.S_PULLED_NS: wire_ns(traffic.pulled(0)),
        loop.S_ANSWER_PULL_NS: answer_ns("parameters", traffic.pulled(0)),
        loop.S_MERGE_NS: costs.merge_ns,
        loop.S_INSTALL_NS: costs.install_ns,
        loop.S_FIRST_STEP: job.steps.start,
        loop.S_HEADER_BYTES: traffic.header_bytes,
    }.items():
        settings[place] = value
    tables = np.zeros((len(traffic.tables), loop.NUM_COLUMNS), dtype=np.int64)
    for table in range(len(traffic.tables)):
        asked, nbytes = traffic.asked(table), traffic.looked_up(table)
        tables[table] = wire_ns(asked), wire_ns(nbytes), answer_ns("rows", nbytes), asked
    together = np.array([[trainer == server for server in hosts.servers] for trainer in hosts.trainers], dtype=np.int64)
    pushes = [[wire_ns(nbytes), costs.took_ns("server", 0, update, nbytes), nbytes] for nbytes in nbytes_of]
    num_gradients = rules.trainers * len(job.steps)
    log = np.zeros((num_gradients * rules.servers, 5), dtype=np.int64)
    stale = np.zeros((rules.servers, num_gradients + 1), dtype=np.int64)
    # A push, a flush's pull and another a step at most, a look-up a table; and a few at the end.
    most_heard = rules.servers * (num_gradients * (3 + len(traffic.tables)) + 4 * rules.trainers)
    waited = np.zeros((most_heard, 2), dtype=np.int64)
    arrays = np.ascontiguousarray(np.array(pushes, dtype=np.int64).T)
    think = stretched(job.table.forward_ns + job.table.backward_ns, job.draws)
    starts, ends, sent, loads, logged, heard = loop.run_loop(settings, think, together, tables, arrays, log, waited, stale)
    loads[:, loop.L_UNTIL] = np.maximum(loads[:, loop.L_UNTIL], ends.max())
    return TwinExecution(
        starts_ns=starts, ends_ns=ends, bytes_sent=sent, pushes=log[:logged], loads=loads, waits_ns=waited[:heard], staleness=stale
    )


def _checked(job: Job) -> Linear:
    where, value, instead = "engine", "'compiled'", 'engine = "reference" simulates'
    if job.rules.mode != "asynchronous":
        mode = {"geo_sgd": "GeoSGD"}.get(job.rules.mode, f"{job.rules.mode} training")
        hint = f"{instead} {mode}, too; a_sync = true with k_steps = 0 is asynchronous"
        raise ConfigError(f"knows asynchronous training alone, and this is {mode}", where, value, hint)
    if not job.hosts.apart:
        raise ConfigError("knows no links that connections share", where, value, f"{instead} them; so do hosts apart")
    if job.table.load or job.table.fetch:
        hint = f"{instead} them; or leave load and fetch out of workload.host"
        raise ConfigError("knows no batches that are waited for, and no results that are read back", where, value, hint)
    if not isinstance(job.costs, Linear):
        raise ConfigError(f"knows linear costs alone, and these are {type(job.costs).__name__}", where, value, f"{instead} them")
    return job.costs


def stretched(base_ns: int, draws: Sequence[Sequence[int]]) -> Integers:
    """A duration under every draw, ``(trainers, steps)``; in Python's integers where 64 bits are too few."""
    x = np.array(draws, dtype=np.int64)
    if base_ns * (ONE + int(x.max(initial=0))) < _SMALL:
        return (base_ns * (ONE + x) + ONE // 2) // ONE
    return np.array([[stretch(base_ns, value) for value in row] for row in draws], dtype=np.int64)


def execute_compiled(job: Job) -> tuple[pd.DataFrame, tuple[Load, ...]]:
    """A job's table of steps and servers' loads, as the reference gives them; see ``execute_twin`` for what it raises."""
    twin = execute_twin(job)
    return _table(job, twin), _loads(twin)


def _table(job: Job, twin: TwinExecution) -> pd.DataFrame:
    trainers, steps = twin.starts_ns.shape
    num = trainers * steps
    forward = stretched(job.table.forward_ns, job.draws)
    think = stretched(job.table.forward_ns + job.table.backward_ns, job.draws)
    if max(int(twin.ends_ns.max()), int(twin.bytes_sent.max())) > LARGEST:
        raise uncountable()
    frame = pd.DataFrame(
        {
            "rank": np.repeat(np.arange(trainers), steps),
            "step": np.tile(np.arange(job.steps.start, job.steps.stop), trainers),
            "start_ns": twin.starts_ns.ravel(),
            "read_ns": np.full(num, job.table.read),
            "forward_ns": forward.ravel(),
            "backward_ns": (think - forward).ravel(),
            "stall_ns": (twin.ends_ns - twin.starts_ns - think).ravel() - job.table.read,
            "update_ns": np.zeros(num, dtype=np.int64),
            "end_ns": twin.ends_ns.ravel(),
            "arrival_ns": pd.array([pd.NA], dtype="Float64").repeat(num),
            "local_steps": pd.array([pd.NA], dtype="Int64").repeat(num),
            "loss": np.full(num, np.nan),
            "bytes_sent": twin.bytes_sent.ravel(),
        }
    )
    return steps_table_of(frame)


def _loads(twin: TwinExecution) -> tuple[Load, ...]:
    loads = []
    for server, row in enumerate(twin.loads.tolist()):
        since, until, busy, length, longest, length_ns = row[:6]
        lags = np.flatnonzero(twin.staleness[server])
        loads.append(
            Load(
                since_ns=since,
                until_ns=until,
                busy_ns=busy,
                length=length,
                longest=longest,
                length_ns=length_ns,
                waits_ns=twin.waits_ns[twin.waits_ns[:, 0] == server, 1].tolist(),
                staleness=Counter({int(lag): int(twin.staleness[server, lag]) for lag in lags}),
            )
        )
    return tuple(loads)
