"""Simulations on a local Ray of two nodes of a core each, beside the pool of two processes.

    python reports/ray/measure.py            # all, into raw.json: 10 minutes on two cores
    python reports/ray/measure.py --print    # the tables of README.md
    python reports/ray/measure.py --small    # a tenth of the points and few plans: prints the tables, and writes nothing

Every run of Ray connects anew, as a command does: workers start and import. Rounds are in turns: pool, Ray, Ray, pool.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from fleetbench.config import encode
from fleetbench.digests import json_digest
from fleetbench.experiment import Experiment, apply_override
from fleetbench.store import commit, machine
from sim.many.pool import _PARTS, Where, run_all, started
from sim.many.sweep import Axis, sweep
from tuner.search import search, shortened
from tuner.simulated.candidates import step_time
from tuner.space import search_space

HERE = Path(__file__).parent
RAW = HERE / "raw.json"
CORES = 2
POINTS, SIZES = 40, 138
if sys.argv[1:] == ["--small"]:
    POINTS, SIZES = 4, 4
KILLED = 10
WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FILE: dict[str, Any] = {
    "name": "swept",
    "workload": {
        "model": "layers",
        "steps": 20,
        "layers": [{"name": "block", "params": 4_000_000, "forward": "3 ms", "backward": "6 ms", "repeat": 6}],
    },
    "cluster": {
        "nodes": 8,
        "trainers_per_node": 4,
        "intra": {"bandwidth": "100 Gbit/s", "latency": "5 us"},
        "inter": {"bandwidth": "25 Gbit/s", "latency": "20 us"},
        "stragglers": [{"kind": "jitter", "distribution": "lognormal", "mean": 0.1}],
    },
}
SEARCHED = {
    "search_seconds": 3600.0,
    "simulated_steps": 3,
    "nccl_comm_num": [1, 2, 3, 4],
    "allow": ["wire16"],
    "fuse_grad_size_in_MB": [round(1.5 + 1.5 * number, 1) for number in range(SIZES)],
}
"""Of a search without a limit that matters: sizes of fusion among 40 unlike layers, wires, communicators and hierarchies."""


def swept(on: Where) -> dict[str, Any]:
    """2,000 points: ``POINTS`` numbers of nodes at 50 bandwidths."""
    base = encode(Experiment.from_dict(FILE))

    def load(more: Sequence[str]) -> Experiment:
        data = json.loads(json.dumps(base))
        for override in more:
            apply_override(data, override)
        return Experiment.from_dict(data)

    links = [f'{{ bandwidth = "{gbit} Gbit/s"; latency = "20 us" }}'.replace(";", ",") for gbit in range(1, 101, 2)]
    axes = [("cluster.nodes", [str(nodes) for nodes in range(1, 1 + POINTS)]), ("cluster.inter", links)]
    found = sweep(load, [Axis(key=key, values=tuple(values)) for key, values in axes], on=on)
    return {"points": len(found.table), "digest": json_digest(found.table.to_json(double_precision=15))}


def planned() -> Experiment:
    """The searched file: 40 layers of sizes that differ, so that most limits of fusion give buckets of their own."""
    sizes = [600_000 + 97_001 * (number * 7 % 40) for number in range(40)]
    layers = [{"name": f"layer{place}", "params": size, "forward": "1 ms", "backward": "2 ms"} for place, size in enumerate(sizes)]
    cluster = {name: value for name, value in FILE["cluster"].items() if name != "stragglers"} | {"nodes": 2, "trainers_per_node": 2}
    workload = {"model": "layers", "steps": 50, "layers": layers}
    return Experiment.from_dict({"name": "searched", "workload": workload, "cluster": cluster, "tune": SEARCHED})


def searched(on: Where) -> dict[str, Any]:
    """A search of a space of 20,304 plans, of which those that differ are simulated."""
    experiment = planned()
    space = search_space(experiment)
    with tempfile.TemporaryDirectory() as out:
        found = search(experiment, space, None, out=Path(out), step_s=step_time(shortened(experiment)), on=on)
    plain, took_ms = [(one.key, one.simulated_s, one.arm) for one in found.tried], [round(1e3 * one.took_s, 2) for one in found.tried]
    return {"plans": space.size, "simulated": len(plain), "digest": json_digest(plain), "took_ms": took_ms}


@contextlib.contextmanager
def cluster() -> Iterator[None]:
    """Two nodes of a core each, on loopback."""
    local = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    os.environ |= local
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        nodes.add_node(num_cpus=1)
        os.environ["RAY_ADDRESS"] = nodes.address
        yield
    finally:
        del os.environ["RAY_ADDRESS"]
        nodes.shutdown()


def timed(what: Callable[[Where], dict[str, Any]], on: Where) -> dict[str, Any]:
    """A run's seconds of the clock with connecting, and without: workers have then made their imports."""
    began = time.perf_counter()
    with started(on):
        if on == "ray":
            run_all(_imported, range(4 * CORES), on=on)
        ready, before_s = time.perf_counter(), cpu_s(on)
        found = what(on)
        ended, spent_s = time.perf_counter(), cpu_s(on) - before_s
    known = {"on": on, "start_s": round(ready - began, 2), "work_s": round(ended - ready, 2), "cpu_s": round(spent_s, 2)}
    print(known, os.getloadavg(), flush=True)
    return {**known, "load": os.getloadavg()[0], **found}


def cpu_s(on: Where) -> float:
    """CPU seconds of this process and its forks that have ended; with Ray, of its nodes and workers, too."""
    total = sum(os.times()[:4])
    for one in psutil.Process().children(recursive=True) if on == "ray" else ():
        with contextlib.suppress(psutil.Error):
            total += sum(one.cpu_times()[:4])
    return total


def _imported(_: int) -> None:
    import sim.run  # what a worker imports first
    import tuner.simulated.candidates

    assert sim.run
    assert tuner.simulated.candidates
    time.sleep(0.5)  # so that every worker gets one


def struck(expected: str) -> dict[str, Any]:
    """The sweep, of which ``KILLED`` workers are killed, one every three seconds."""
    killed, ended = list[int](), threading.Event()

    def kill() -> None:
        while not ended.wait(3.0) and len(killed) < KILLED:
            for one in psutil.process_iter():
                with contextlib.suppress(psutil.Error):
                    if "ray::_called" in " ".join(one.cmdline()):
                        one.kill()
                        killed.append(one.pid)
                        break

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = timed(swept, "ray")
    finally:
        ended.set()
        killer.join()
    return {**found, "killed": len(killed), "is_equal": found["digest"] == expected}


def schedule(took_s: Sequence[float], workers: int, task_s: float) -> float:
    """Seconds until the last part ends: each part to the worker that is free first, in the order of ``run_all``."""
    count = min(len(took_s), _PARTS * workers)
    free = [0.0] * workers
    for first in range(count):
        heapq.heappush(free, heapq.heappop(free) + task_s + sum(took_s[first::count]))
    return max(free)


def _nothing(_: int) -> None:
    """A call that takes no time."""


def main() -> None:
    """Measure, or print."""
    if sys.argv[1:] == ["--print"]:
        show(json.loads(RAW.read_text(encoding="utf-8")))
        return
    raw: dict[str, Any] = {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": machine()}
    with cluster():
        with started("ray"):
            run_all(_nothing, range(64), on="ray")
            began = time.perf_counter()
            run_all(_nothing, range(64 * 50), on="ray")  # 64 tasks
            raw["task_ms"] = round((time.perf_counter() - began) / 64 * CORES * 1e3, 2)
        raw |= {"sweep": [], "search": []}
        for turn in (("local", "ray"), ("ray", "local")):
            raw["sweep"] += [timed(swept, on) for on in turn]
            if "struck" not in raw:
                raw["struck"] = struck(raw["sweep"][0]["digest"])
            write(raw)
            raw["search"] += [timed(searched, on) for on in turn]
            took_ms = [one.pop("took_ms") for one in raw["search"] if "took_ms" in one]
            raw.setdefault("took_ms", took_ms[0])
            write(raw)
    show(raw)


def write(raw: dict[str, Any]) -> None:
    """Into the raw file."""
    if sys.argv[1:] != ["--small"]:
        RAW.write_text(json.dumps(raw) + "\n", encoding="utf-8")


def show(raw: dict[str, Any]) -> None:
    """The tables."""
    print("| | pool, s | Ray, s | Ray / pool | CPU s of the pool | of Ray | Ray / pool | start of Ray, s | equal |")
    print("|---" * 9 + "|")
    for name in (name for name in ("sweep", "search") if raw[name]):
        pool, ray = ([one for one in raw[name] if one["on"] == on] for on in ("local", "ray"))
        cells = [name]
        for key in ("work_s", "cpu_s"):
            cells += [", ".join(f"{one[key]:.1f}" for one in own) for own in (pool, ray)]
            cells.append(f"{statistics.median(one[key] for one in ray) / statistics.median(one[key] for one in pool):.2f}")
        start = statistics.median(one["start_s"] for one in ray)
        equal = "yes" if len({one["digest"] for one in raw[name]}) == 1 else "NO"
        print(f"| {' | '.join([*cells, f'{start:.1f}', equal])} |")
    print(f"\n{raw['struck']['killed']} workers killed: equal {raw['struck']['is_equal']}, {raw['struck']['work_s']} s")
    if "took_ms" not in raw:
        return
    took_s, task_s = [one / 1e3 for one in raw["took_ms"]], raw["task_ms"] / 1e3
    print(f"\n{len(took_s)} plans, {sum(took_s):.0f} s of a core, {raw['task_ms']} ms a task\n")
    print("| workers | s | efficiency |\n|---|---|---|")
    for workers in WORKERS:
        seconds = schedule(took_s, workers, task_s)
        print(f"| {workers} | {seconds:.1f} | {sum(took_s) / workers / seconds:.0%} |")


if __name__ == "__main__":
    main()
