"""Queueing: paced trainers on the testbed, and the same job on the simulated clock, with what one trainer alone says of costs."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hosts import run_on_hosts

from fleetbench.cluster import Link
from fleetbench.plan.layers import Layer, LayerTable
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.staleness import total_variation
from fleetbench.stragglers import Jitter, draws
from real.testbed.link_shaping import PEAK
from real.testbed.testbed import Testbed
from real.testbed.topology import PAYLOAD_SHARE
from sim.servers.actor import Job, Linear
from sim.servers.ports import Hosts
from sim.servers.simulate import execute
from sim.servers.traffic import Traffic

HERE = Path(__file__).parent
SERVERS = 2
HEADER_BYTES = 100
"""Of a message, about: its head, the lengths of its tensors, and ZeroMQ's frames."""
PATIENCE_S = 180.0
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What trainers do."""

    numbers: int
    """Dense parameters, 4 bytes each, over all servers together."""
    think_ns: int
    """A step takes 1 + X times this, X of a gamma law with mean 0.5 and a coefficient of variation of 1."""
    steps: int


LOADS = {
    "light": Load(numbers=10_000, think_ns=20_000_000, steps=800),
    "heavy": Load(numbers=40_000, think_ns=40_000_000, steps=400),
}


def shortened(load: Load, times: int = 10) -> Load:
    """With so many times fewer steps."""
    return dataclasses.replace(load, steps=load.steps // times)


def think_draws(load: Load, trainers: int, seed: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """X of every rank and step, in units of 2^-24."""
    return draws((Jitter(distribution="gamma", mean=0.5, cv=1.0),), seed, trainers, 1, 1, load.steps)


def paced_run(testbed: Testbed, folder: Path, load: Load, trainers: int, seed: int, *, closed: bool) -> Entry:
    """One job on the testbed."""
    x = think_draws(load, trainers, seed)
    thinks = [[load.think_ns * (2**24 + int(value)) // 2**24 for value in row] for row in x]
    (folder / "thinks.json").write_text(json.dumps(thinks), encoding="utf-8")
    script = [str(HERE / "paced_train.py"), str(folder), str(load.numbers), str(int(closed))]
    run_on_hosts(testbed, trainers, script, folder / "log", patience_s=PATIENCE_S)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("trainer*.json"))]
    servers = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("server*.json"))]
    staleness = Counter[int]()
    for server in servers:
        staleness.update({int(value): int(num) for value, num in server["staleness"]})
    late_s = np.concatenate([one["late_s"] for one in found])
    return {
        "steps_per_s": trainers * load.steps / (max(one["ends_s"][-1] for one in found) - min(one["ends_s"][0] for one in found)),
        "mean_step_s": float(np.mean([np.diff(one["ends_s"]).mean() for one in found])),
        "mean_think_s": float(np.mean(thinks)) * 1e-9,
        "staleness": {str(value): num for value, num in sorted(staleness.items())},
        "server_busy_s_per_update": sum(server["busy_s"] for server in servers) / sum(server["updates"] for server in servers),
        "late_s": {"p50": float(np.quantile(late_s, 0.5)), "p95": float(np.quantile(late_s, 0.95))},
    }


def carried_bps(rate_bps: int) -> float:
    """Payload of a link that is idle often enough: what was saved meanwhile is spent at the peak rate."""
    return PEAK * rate_bps * PAYLOAD_SHARE


def simulated(load: Load, rate_bps: int, trainers: int, seed: int, constants: Mapping[str, int], *, closed: bool) -> Entry:
    """The same job on the simulated clock."""
    link = Link(bandwidth=BitsPerSecond(round(carried_bps(rate_bps))), latency=Nanoseconds(constants["message_ns"]), payload=True)
    think = Layer(name="all", forward=Nanoseconds(0), backward=Nanoseconds(load.think_ns))
    job = Job(
        rules=ServerRules(mode="asynchronous", trainers=trainers, servers=SERVERS),
        table=LayerTable(key="report", layers=(think,), read=Nanoseconds(constants["extra_ns"])),
        traffic=Traffic(servers=SERVERS, dense_bytes=4 * load.numbers, header_bytes=HEADER_BYTES),
        costs=Linear(push_ns=constants["service_ns"]),
        hosts=Hosts(trainers=tuple(range(trainers)), servers=tuple(range(trainers, trainers + SERVERS)), link=link),
        steps=range(1, load.steps + 1),
        draws=tuple(map(tuple, think_draws(load, trainers, seed).tolist())),
        waits_each_step=closed,
    )
    execution = execute(job)
    steps = load.steps - 1  # the last ends when all that is queued is out, which is not measured
    end_ns = max(record.end_ns for record in execution.records if record.step == steps)
    staleness = sum((loaded.staleness for loaded in execution.loads), Counter[int]())
    return {
        "steps_per_s": trainers * steps / (end_ns * 1e-9),
        "mean_step_s": end_ns * 1e-9 / steps,
        "staleness": {str(value): num for value, num in sorted(staleness.items())},
    }


def constants_of(load: Load, rate_bps: int, seed: int, closed: Entry, free: Entry) -> dict[str, int]:
    """What one trainer says of costs; the rate of the links is not fitted.

    ``service_ns``: a server's work for a step. ``extra_ns``: a trainer's own work for a step, without waiting. ``message_ns``: the
    latency of a message, which makes a simulated trainer that waits as slow as the measured one: it is on the way four times a step.
    """
    service_ns = round(closed["server_busy_s_per_update"] * 1e9)
    extra_ns = max(0, round((free["mean_step_s"] - free["mean_think_s"]) * 1e9))
    without = {"message_ns": 0, "service_ns": service_ns, "extra_ns": extra_ns}
    step_s = simulated(load, rate_bps, 1, seed, without, closed=True)["mean_step_s"] - mean_think_s(load, 1, seed)
    message_ns = max(0, round((closed["mean_step_s"] - closed["mean_think_s"] - step_s) * 1e9 / 4))
    round_trip_ns = max(0, round((closed["mean_step_s"] - closed["mean_think_s"]) * 1e9) - extra_ns)
    return {"message_ns": message_ns, "service_ns": service_ns, "extra_ns": extra_ns, "round_trip_ns": round_trip_ns}


def mean_think_s(load: Load, trainers: int, seed: int) -> float:
    """Of all ranks and steps."""
    return load.think_ns * 1e-9 * (1 + float(think_draws(load, trainers, seed).mean()) / 2**24)


def row(load: Load, rate_bps: int, trainers: int, seed: int, constants: Mapping[str, int], measured: Entry, *, closed: bool) -> Entry:
    """Measured, simulated and bounded.

    The bound is min(N / (think + service), 1 / service). In the first part think is a step's time without waiting and service all that
    a lone trainer waits for; a trainer that does not wait has the longer of the two for both. In the second, service is the work for
    one step of what is busiest at a server: its link, one way, or its process.
    """
    predicted = simulated(load, rate_bps, trainers, seed, constants, closed=closed)
    own_s = mean_think_s(load, trainers, seed) + constants["extra_ns"] * 1e-9
    waits_s = constants["round_trip_ns"] * 1e-9
    link_s = 8 * (4 * load.numbers / SERVERS + HEADER_BYTES) / carried_bps(rate_bps)
    busiest_s = max(link_s, constants["service_ns"] * 1e-9)
    alone_s = own_s + waits_s if closed else max(own_s, waits_s)
    return {
        "measured": measured,
        "simulated": predicted,
        "throughput_ratio": predicted["steps_per_s"] / measured["steps_per_s"],
        "bound_steps_per_s": min(trainers / alone_s, 1 / busiest_s),
        "bounds_steps_per_s": [trainers / alone_s, 1 / busiest_s],
        "mean_staleness": [mean(predicted["staleness"]), mean(measured["staleness"])],
        "total_variation": total_variation(predicted["staleness"], measured["staleness"]),
    }


def mean(histogram: Mapping[str, int]) -> float:
    """Of a histogram."""
    return sum(int(value) * num for value, num in histogram.items()) / sum(histogram.values())
