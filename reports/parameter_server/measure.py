"""Examples a second and trainer: asynchronous, asynchronous and tuned, GeoSGD, and training alone; 2 trainers and 1 server.

python reports/parameter_server/measure.py [--seconds 10] [--repeats 3]: writes runs.json beside itself,
and prints a table of medians. Modes take turns, so that a drift of the machine meets all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

from real.job.served_launcher import launch_placed
from real.servers.hosts import on_this_machine

HERE = Path(__file__).parent
MODES: dict[str, tuple[int, dict[str, object]]] = {
    "asynchronous": (0, {}),
    "asynchronous, tuned": (0, {"max_merge_var_num": 20, "send_queue_size": 20, "independent_recv_thread": True, "thread_pool_size": 2}),
    "GeoSGD, K = 400": (400, {}),
}
DIMENSIONS = (64, 300)


def run(mode: str, dimension: int, seconds: float) -> dict[str, object]:
    """One launch; what its trainers wrote."""
    k_steps, configs = MODES[mode]
    with tempfile.TemporaryDirectory() as folder:
        script = [str(HERE / "train.py"), folder, str(k_steps), str(dimension), str(seconds), json.dumps(configs)]
        load = os.getloadavg()[0]
        launch_placed(on_this_machine(1, 2), script, log_dir=Path(folder) / "log", echo=lambda _text: None)
        trainers = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(Path(folder).glob("trainer*.json"))]
        server = (Path(folder) / "log" / "serverlog.0").read_text(encoding="utf-8").strip().splitlines()[-1]
    return {"mode": mode, "dimension": dimension, "at": time.strftime("%F %T"), "load_before": load, "trainers": trainers, "server": server}


def main() -> None:
    """Measure, write, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    runs = []
    for repeat in range(arguments.repeats):
        for dimension in DIMENSIONS:
            order = list(MODES) if repeat % 2 == 0 else list(reversed(MODES))
            runs += [run(mode, dimension, arguments.seconds) for mode in order]
    machine = {"cpus": os.cpu_count(), "platform": platform.platform(), "seconds": arguments.seconds}
    (HERE / "runs.json").write_text(json.dumps({"machine": machine, "runs": runs}, indent=1), encoding="utf-8")
    print(f"{'examples/s and trainer':24}" + "".join(f"{f'dimension {dimension}':>24}" for dimension in DIMENSIONS))
    for mode in MODES:
        cells = []
        for dimension in DIMENSIONS:
            rates = [
                trainer["examples_per_s"]
                for one in runs
                if (one["mode"], one["dimension"]) == (mode, dimension)
                for trainer in one["trainers"]
            ]
            cells.append(f"{statistics.median(rates):>10,.0f} ({min(rates):,.0f} to {max(rates):,.0f})")
        print(f"{mode:24}" + "".join(f"{cell:>32}" for cell in cells))


if __name__ == "__main__":
    main()
