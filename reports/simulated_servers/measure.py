"""How near the queue of simulated parameter servers is to theory: ``python measure.py [OUT.json]``."""

from __future__ import annotations

import json
import os
import sys
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np

from fleetbench.cluster import Link
from fleetbench.plan.layers import Layer, LayerTable
from fleetbench.plan.operations import Operation
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.staleness import counts_of, load_of, quantiles_of
from fleetbench.store import machine, versions
from sim.servers.actor import Job, Linear
from sim.servers.ports import Hosts
from sim.servers.simulate import execute
from sim.servers.traffic import Traffic

THINK_NS = 1_000_000
SERVICE_NS = 1_000
FAST = Link(bandwidth=BitsPerSecond(10**11), latency=Nanoseconds(20_000))


def job(trainers: int, steps: int, kind: str, *, service_ns: int = SERVICE_NS) -> Job:
    """Trainers that think a millisecond, exponentially, and exchange ``dense`` parameters, or none (``pushes``)."""
    generator = np.random.default_rng(0)
    draws = np.rint((generator.exponential(1.0, (trainers, steps)) - 1) * 2**24).astype(int).tolist()
    return Job(
        rules=ServerRules(mode="asynchronous", trainers=trainers, servers=1, has_dense=kind == "dense"),
        table=LayerTable(key="report", layers=(Layer(name="all", forward=Nanoseconds(0), backward=Nanoseconds(THINK_NS)),)),
        traffic=Traffic(servers=1, dense_bytes=100_000 if kind == "dense" else 0),
        costs=Linear(push_ns=service_ns),
        hosts=Hosts(trainers=tuple(range(trainers)), servers=(trainers,), link=FAST),
        steps=range(1, steps + 1),
        draws=tuple(map(tuple, draws)),
    )


class ExponentialService:
    """A server's work on a push, drawn anew for each."""

    def __init__(self, mean_ns: float) -> None:
        self._mean_ns = mean_ns
        self._generator = np.random.default_rng(1)

    def took_ns(self, role: str, rank: int, operation: Operation, nbytes: int) -> int:  # noqa: ARG002  # as ``Costs`` asks
        """See ``Costs``."""
        return round(self._generator.exponential(self._mean_ns)) if role == "server" and operation.kind == "update" else 0


def queue() -> list[dict[str, Any]]:
    """The machine repairman's model, M/M/1//N: trainers that wait for their push, exponential think and service."""
    import dataclasses

    rows = []
    for trainers in (1, 2, 4, 8, 16):
        for load in (0.1, 0.3, 1.0):
            service_ns = load * THINK_NS
            steps = 12_000 // trainers
            closed = dataclasses.replace(job(trainers, steps, "pushes"), costs=ExponentialService(service_ns), waits_each_step=True)
            at_once = dataclasses.replace(FAST, latency=Nanoseconds(0))
            closed = dataclasses.replace(closed, hosts=dataclasses.replace(closed.hosts, link=at_once))
            found: Any = load_of(execute(closed).loads)
            idle = 1 / sum(factorial(trainers) / factorial(trainers - n) * load**n for n in range(trainers + 1))
            throughput = (1 - idle) / (service_ns / 1e9)
            rows.append(
                {
                    "trainers": trainers,
                    "service_over_think": load,
                    "throughput": found["gradients_per_s"] / throughput,
                }
            )
            print(rows[-1], flush=True)
    return rows


def staleness() -> list[dict[str, Any]]:
    """Trainers that wait for their own push and pull, without work on the server: N - 1."""
    import dataclasses

    rows = []
    for trainers in (1, 2, 4, 8, 16):
        closed = dataclasses.replace(job(trainers, 800, "dense", service_ns=0), waits_each_step=True)
        fast = dataclasses.replace(FAST, latency=Nanoseconds(0), bandwidth=BitsPerSecond(10**15))
        closed = dataclasses.replace(closed, hosts=dataclasses.replace(closed.hosts, link=fast))
        found = quantiles_of(counts_of(execute(closed).loads))
        assert found is not None
        rows.append({"trainers": trainers, **found})
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "raw.json")
    quiet = {"load_before": os.getloadavg()[0]}
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    result |= {"queue": queue(), "staleness": staleness()}
    result |= {"host": machine(), "versions": versions(), "quiet": quiet | {"load_after": os.getloadavg()[0]}}
    out.write_text(json.dumps(result, indent=1), encoding="utf-8")
