"""Twin: asynchronous jobs at a speed for millions of pushes, equal to ``sim.servers.job.execute`` to the nanosecond.

It knows jobs whose connections share no link (``Hosts.apart``), with linear costs. Needs numba, an
optional dependency.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.plan.operations import Operation
from fleetbench.stragglers import ONE, stretch
from sim.clock import half_up
from sim.servers.costs import Linear
from sim.servers.job import Job
from sim.work import BITS_NS

Integers = npt.NDArray[np.int64]
_SMALL = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class TwinExecution:
    """What the loop saw. Times in ns."""

    starts_ns: Integers
    """Of steps, ``(trainers, steps)``."""
    ends_ns: Integers
    pushes: Integers
    """Of every push, in the order in which they were heard: when, server, rank, count of gradients, staleness of the oldest of
    them; ``(pushes, 5)``."""
    loads: Integers
    """Of every server, from the first counted step on, ``(servers, 10)``: since, until, busy, length, longest, integral of the
    length, waited, messages, gradients, sum of their staleness."""


def execute_twin(job: Job) -> TwinExecution:
    """Run an asynchronous job. Raises ``ConfigError`` for a job that the twin does not know, ``EnvironmentLacks`` without numba."""
    costs = _checked(job)
    if find_spec("numba") is None:
        raise EnvironmentLacks("numba is not installed", "the twin of parameter servers", hint="pip install numba, or use the SimPy engine")
    from sim.servers import twin_loop as loop  # half a second of imports, and of compiling on the first run

    rules, traffic, hosts = job.rules, job.traffic, job.hosts

    def wire_ns(nbytes: int) -> int:
        return half_up(Fraction(nbytes * BITS_NS, hosts.link.bandwidth))

    def answer_ns(payload: str, nbytes: int) -> int:
        answer = Operation(id=0, kind="send", payload=payload)  # type: ignore[arg-type]  # a payload
        return costs.took_ns("server", 0, answer, nbytes)

    update = Operation(id=0, kind="update")
    pushes = [traffic.push(count) for count in range(rules.max_merge + 1)]
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
    }.items():
        settings[place] = value
    tables = np.zeros((len(traffic.tables), 3), dtype=np.int64)
    for table in range(len(traffic.tables)):
        nbytes = traffic.looked_up(table)
        tables[table] = wire_ns(traffic.asked(table)), wire_ns(nbytes), answer_ns("rows", nbytes)
    together = np.array([[trainer == server for server in hosts.servers] for trainer in hosts.trainers], dtype=np.int64)
    log = np.zeros((rules.trainers * len(job.steps) * rules.servers, 5), dtype=np.int64)
    starts, ends, loads, logged = loop.run_loop(
        settings,
        _think_ns(job),
        together,
        tables,
        np.array([wire_ns(nbytes) for nbytes in pushes], dtype=np.int64),
        np.array([costs.took_ns("server", 0, update, nbytes) for nbytes in pushes], dtype=np.int64),
        log,
    )
    loads[:, loop.L_UNTIL] = np.maximum(loads[:, loop.L_UNTIL], ends.max())
    return TwinExecution(starts_ns=starts, ends_ns=ends, pushes=log[:logged], loads=loads)


def _checked(job: Job) -> Linear:
    where = "the twin of parameter servers"
    if job.rules.mode != "asynchronous":
        raise ConfigError("only asynchronous training has a twin", where, job.rules.mode, "use the SimPy engine")
    if not job.hosts.apart:
        raise ConfigError("connections that share links have no twin", where, hint="use the SimPy engine, or hosts apart")
    if not isinstance(job.costs, Linear):
        raise ConfigError("only linear costs have a twin", where, type(job.costs).__name__, "use the SimPy engine")
    return job.costs


def _think_ns(job: Job) -> Integers:
    """Forward and backward of every step, ``(trainers, steps)``; in Python's integers where 64 bits are too few."""
    base_ns = job.table.forward_ns + job.table.backward_ns
    x = np.array(job.draws, dtype=np.int64)
    if base_ns * (ONE + int(x.max(initial=0))) < _SMALL:
        return (base_ns * (ONE + x) + ONE // 2) // ONE
    return np.array([[stretch(base_ns, value) for value in row] for row in job.draws], dtype=np.int64)
