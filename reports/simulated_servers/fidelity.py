"""Simulated against real servers: throughput and staleness of 4 trainers and 2 servers, predicted from 1 trainer.

``python fidelity.py [OUT.json]``. Trainers are real processes on this machine that sleep instead of
computing; servers are real, over loopback. One trainer that waits for its own push and pull says what a
message costs; with that the simulator predicts four trainers, waiting and not. Both have the same think times.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from fleetbench.cluster import Link
from fleetbench.plan.layers import Layer, LayerTable
from fleetbench.plan.servers.rules import ServerRules
from fleetbench.quantities import BitsPerSecond, Nanoseconds
from fleetbench.store import machine, versions
from fleetbench.stragglers import Jitter, draws
from real.served_launching import launch_served
from sim.servers.costs import Linear
from sim.servers.job import Job, execute
from sim.servers.traffic import Traffic
from sim.servers.wires import Hosts

HERE = Path(__file__).parent
STEPS, SERVERS, THINK_NS = 300, 2, 20_000_000
NUMBERS = 10_000


def real(trainers: int, *, closed: bool) -> dict[str, Any]:
    """One launch."""
    with tempfile.TemporaryDirectory() as folder:
        x = think_draws(trainers)
        thinks = [[THINK_NS * (2**24 + int(value)) // 2**24 for value in row] for row in x]
        Path(folder, "thinks.json").write_text(json.dumps(thinks), encoding="utf-8")
        script = [str(HERE / "fidelity_train.py"), folder, str(STEPS), str(int(closed))]
        launch_served(SERVERS, trainers, script, log_dir=Path(folder) / "log", echo=lambda _text: None)
        found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("trainer*.json"))]
        servers = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("server*.json"))]
    begin_s, end_s = min(one["ends_s"][0] for one in found), max(one["ends_s"][-1] for one in found)
    staleness = Counter[int]()
    for server in servers:
        staleness.update({int(value): int(num) for value, num in server["staleness"]})
    late_s = np.concatenate([np.array(one["slept_s"]) - np.array(row) * 1e-9 for one, row in zip(found, thinks, strict=True)])
    return {
        "steps_per_s": trainers * STEPS / (end_s - begin_s),
        "mean_step_s": float(np.mean([np.diff(one["ends_s"]).mean() for one in found])),
        "staleness": dict(sorted(staleness.items())),
        "server_busy_s_per_update": sum(server["busy_s"] for server in servers) / sum(server["updates"] for server in servers),
        "sleeps_late_s": {"mean": float(late_s.mean()), "p95": float(np.quantile(late_s, 0.95))},
    }


def think_draws(trainers: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """X of every rank and step."""
    return draws((Jitter(distribution="gamma", mean=0.5, cv=1.0),), 0, trainers, 1, 1, STEPS)


def simulated(trainers: int, *, closed: bool, message_ns: int, service_ns: int, extra_ns: int) -> dict[str, Any]:
    """The same job on the simulated clock."""
    hosts = Hosts(
        trainers=tuple(range(trainers)),
        servers=tuple(range(trainers, trainers + SERVERS)),
        link=Link(bandwidth=BitsPerSecond(10**11), latency=Nanoseconds(message_ns)),
    )
    job = Job(
        rules=ServerRules(mode="asynchronous", trainers=trainers, servers=SERVERS),
        table=LayerTable(
            key="report", layers=(Layer(name="all", forward=Nanoseconds(0), backward=Nanoseconds(THINK_NS)),), read=Nanoseconds(extra_ns)
        ),
        traffic=Traffic(servers=SERVERS, dense_bytes=4 * NUMBERS),
        costs=Linear(push_ns=service_ns),
        hosts=hosts,
        steps=range(1, STEPS + 1),
        draws=tuple(map(tuple, think_draws(trainers).tolist())),
        waits_each_step=closed,
    )
    execution = execute(job)
    end_ns = max(record.end_ns for record in execution.records)
    staleness = sum((load.staleness for load in execution.loads), Counter[int]())
    return {"steps_per_s": trainers * STEPS / (end_ns * 1e-9), "staleness": dict(sorted(staleness.items()))}


def variation(a: dict[int, int], b: dict[int, int]) -> float:
    """Total variation distance of two histograms."""
    whole_a, whole_b = sum(a.values()), sum(b.values())
    return 0.5 * sum(abs(a.get(value, 0) / whole_a - b.get(value, 0) / whole_b) for value in set(a) | set(b))


def mean(histogram: dict[int, int]) -> float:
    """Of a histogram."""
    return sum(value * num for value, num in histogram.items()) / sum(histogram.values())


if __name__ == "__main__":
    load_before = os.getloadavg()[0]
    alone = real(1, closed=True)
    think_s = THINK_NS * 1e-9 * (1 + float(think_draws(1).mean()) / 2**24)
    service_ns = round(alone["server_busy_s_per_update"] * 1e9)
    open_alone = real(1, closed=False)
    extra_ns = max(0, round((open_alone["mean_step_s"] - think_s) * 1e9))  # a trainer's own work, without waiting
    message_ns = max(0, round((alone["mean_step_s"] - think_s) * 1e9) - extra_ns - service_ns) // 4
    constants = {"message_ns": message_ns, "service_ns": service_ns, "extra_ns": extra_ns}
    print(constants, flush=True)
    rows = []
    for trainers, closed in ((1, True), (4, True), (4, False)):
        measured = alone if trainers == 1 else real(trainers, closed=closed)
        predicted = simulated(trainers, closed=closed, **constants)
        rows.append(
            {
                "trainers": trainers,
                "closed": closed,
                "real": measured,
                "simulated": predicted,
                "throughput_ratio": predicted["steps_per_s"] / measured["steps_per_s"],
                "bound_steps_per_s": min(trainers / (think_s + service_ns * 1e-9), 1e9 / service_ns),
                "mean_staleness": [mean(predicted["staleness"]), mean(measured["staleness"])],
                "total_variation": variation(predicted["staleness"], measured["staleness"]),
            }
        )
        print(
            {name: rows[-1][name] for name in ("trainers", "closed", "throughput_ratio", "mean_staleness", "total_variation")}, flush=True
        )
    out = Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "fidelity.json")
    result = {"constants": constants, "runs": rows, "host": machine(), "versions": versions(), "at": time.strftime("%F %T")}
    result |= {"load_before": load_before, "load_after": os.getloadavg()[0]}
    out.write_text(json.dumps(result, indent=1), encoding="utf-8")
