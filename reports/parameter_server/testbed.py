"""Parameter servers on the testbed: queue and staleness against the simulator, and GeoSGD against a tuned asynchronous server.

Run from the repository's root: ``python reports/parameter_server/testbed.py [--part queue modes speed learn rates] [--rounds N]``. Results
are appended to ``testbed_raw.jsonl`` as they come, void ones included; ``--tables`` prints the tables of README.md from that file.
``--quick`` checks in a few minutes that everything runs, and writes to a temporary file. Parts:

- ``queue``: 4 trainers and 2 servers, asynchronous, on hosts of their own. One trainer alone says what a message and an update cost;
  with that the simulator foretells four, waiting for their own pushes and pulls (closed) and not.
- ``modes``: synchronous training and GeoSGD, with emulated trainers: one experiment, measured and simulated.
- ``speed``: Word2Vec at fixed shapes, 2 trainers and 1 server at 200 Mbit/s: examples a second by mode.
- ``learn``: the same with pairs that can be learned: the loss that GeoSGD reaches, and the asynchronous mode in three times the time,
  each at the best of several learning rates, the asynchronous one also at the better of two settings.
- ``rates``: finer learning rates for the asynchronous mode, and its rows of ``learn`` again where one of them is better.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from hosts import run_on_hosts
from learn import held_out_loss
from measure import DIMENSIONS, MODES
from modes import measured_rounds
from queueing import LOADS, Load, constants_of, paced_run, row, shortened
from testbed_tables import tables

from fleetbench.cluster import Cluster, Link
from fleetbench.quantities import BitsPerSecond
from fleetbench.store import commit, machine, versions
from fleetbench.workloads.models.sparse import SkipGram
from real.testbed.noise import Trial, quietly
from real.testbed.testbed import Testbed

HERE = Path(__file__).parent
RAW = HERE / "testbed_raw.jsonl"
MBIT = 10**6
QUEUE_RATE, WORDS_RATE = 100 * MBIT, 200 * MBIT
TRAINERS, SERVERS = 4, 2
WORD_TRAINERS = 2
PATIENCE_S = 120.0
"""For a job, beside the time that it is to train."""
TRIES = 2
"""Of a measurement that is void, unless all is to be quick."""
GEO = "GeoSGD, K = 400"
RIVALS = ("asynchronous", "asynchronous, tuned")
RATES = {GEO: (1.0, 4.0, 16.0)} | dict.fromkeys(RIVALS, (0.25, 1.0, 4.0))
"""Learning rates that are tried, of a loss that is the mean of a batch of 100. Pushes of many gradients bear smaller ones."""
FINER = {(RIVALS[0], 0.5), (RIVALS[0], 2.0), (RIVALS[1], 1 / 64), (RIVALS[1], 1 / 16)}
"""Between and below those of the rival, tried by a part of their own."""
Entry = dict[str, Any]


class Ground:
    """A testbed and a folder for what is run on it. A context manager."""

    def __init__(self, nodes: int, servers: int, rate_bps: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fleetbench-")
        self.testbed = Testbed(Cluster(nodes=nodes, servers=servers, inter=Link(bandwidth=BitsPerSecond(rate_bps))))
        self._jobs = 0

    def __enter__(self) -> Self:
        self.testbed.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.testbed.close()
        self._folder.cleanup()

    def verified(self, part: str) -> Entry:
        """What was built, once every link carries what was declared."""
        self.testbed.verify()
        return {"part": part, "kind": "ground", **self.testbed.record()}

    def job_folder(self) -> Path:
        """A new one."""
        folder = Path(self._folder.name, f"job-{self._jobs}")
        self._jobs += 1
        folder.mkdir()
        return folder


def blocks_of(trial: Trial[Any]) -> Entry:
    """Whether it counts, and the noise of every try."""
    return {"counts": trial.counts, "num_void": trial.num_void, "blocks": [asdict(block) for block in trial.blocks]}


def queue(rounds: int, *, quick: bool) -> Iterator[Entry]:
    """Every load in every round: one trainer alone, waiting and not, then four."""
    loads = {name: shortened(load) for name, load in LOADS.items()} if quick else LOADS
    tries = 1 if quick else TRIES
    with Ground(TRAINERS, SERVERS, QUEUE_RATE) as ground:
        yield ground.verified("queue")

        def run(load: Load, trainers: int, seed: int, *, closed: bool) -> Trial[Entry]:
            return quietly(
                ground.testbed, lambda: paced_run(ground.testbed, ground.job_folder(), load, trainers, seed, closed=closed), tries
            )

        for number in range(rounds):
            for name, load in loads.items():
                alone = {closed: run(shortened(load, 3), 1, number, closed=closed) for closed in (True, False)}
                constants = constants_of(shortened(load, 3), QUEUE_RATE, number, alone[True].value, alone[False].value)
                common = {"part": "queue", "load": name, "round": number, "rate_mbit": QUEUE_RATE // MBIT, "constants": constants}
                for closed, trial in alone.items():
                    yield {**common, "kind": "alone", "closed": closed, "measured": trial.value, **blocks_of(trial)}
                for closed in (True, False) if number % 2 == 0 else (False, True):
                    trial = run(load, TRAINERS, number, closed=closed)
                    found = row(load, QUEUE_RATE, TRAINERS, number, constants, trial.value, closed=closed)
                    calibrated = all(one.counts for one in alone.values())
                    yield {**common, "kind": "row", "closed": closed, "calibration_counts": calibrated, **found, **blocks_of(trial)}


def speed(rounds: int, *, quick: bool) -> Iterator[Entry]:
    """Modes take turns within a round, and in the opposite order in the next."""
    seconds = 2.0 if quick else 8.0
    with Ground(WORD_TRAINERS, 1, WORDS_RATE) as ground:
        yield ground.verified("speed")
        for number in range(rounds):
            for dimension in DIMENSIONS:
                for mode in list(MODES) if number % 2 == 0 else list(reversed(MODES)):
                    k_steps, configs = MODES[mode]
                    arguments = [str(k_steps), str(dimension), str(seconds), json.dumps(configs)]
                    trial = quietly(
                        ground.testbed, lambda arguments=arguments: _words(ground, "train.py", arguments, seconds), 1 if quick else TRIES
                    )
                    yield {"part": "speed", "kind": "row", "mode": mode, "dimension": dimension, "round": number} | {
                        "seconds": seconds,
                        "trainers": trial.value,
                        **blocks_of(trial),
                    }


def learn(rounds: int, *, quick: bool) -> Iterator[Entry]:
    """First the learning rates; then GeoSGD, and the better of the asynchronous modes for three times as long as that took."""
    seconds = 3.0 if quick else 12.0
    with Ground(WORD_TRAINERS, 1, WORDS_RATE) as ground:
        yield ground.verified("learn")
        for dimension in DIMENSIONS:
            found: dict[tuple[str, float], float] = {}
            for mode, rates in RATES.items():
                for rate in rates[1:2] if quick else rates:
                    tried = _learn_once(ground, mode, dimension, seconds * (1 if mode == GEO else 2), rate, 0, quick=quick)
                    found[mode, rate] = tried["held_out"] if math.isfinite(tried["held_out"]) else math.inf
                    yield {**tried, "kind": "tried"}
            ours, rival = (min((key for key in found if (key[0] == GEO) == is_ours), key=found.__getitem__) for is_ours in (True, False))
            for seed in range(1, 1 + rounds):
                geo = _learn_once(ground, ours[0], dimension, seconds, ours[1], seed, quick=quick)
                yield {**geo, "kind": "row"}
                longest = max(trainer["seconds"] for trainer in geo["trainers"])
                yield {**_learn_once(ground, rival[0], dimension, 3 * longest, rival[1], seed, quick=quick), "kind": "row"}


def rates(_: int, *, quick: bool) -> Iterator[Entry]:
    """Finer rates for the rival, at seed 0; where one is better than all of ``learn``, the rival's rows of ``learn`` once more, at that."""
    before = [json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()]
    with Ground(WORD_TRAINERS, 1, WORDS_RATE) as ground:
        yield ground.verified("learn")
        for dimension in DIMENSIONS:
            known = [entry for entry in before if entry["part"] == "learn" and entry.get("dimension") == dimension]
            tried = [entry for entry in known if entry["kind"] == "tried" and entry["mode"] in RIVALS]
            for mode, rate in sorted(FINER - {(entry["mode"], entry["rate"]) for entry in tried}):
                tried.append({**_learn_once(ground, mode, dimension, 6.0 if quick else 24.0, rate, 0, quick=quick), "kind": "tried"})
                yield tried[-1]
            best = min((entry for entry in tried if math.isfinite(entry["held_out"])), key=lambda entry: float(entry["held_out"]))
            if (best["mode"], best["rate"]) in FINER:
                for geo in (entry for entry in known if entry["kind"] == "row" and entry["mode"] == GEO):
                    seconds = 3 * max(trainer["seconds"] for trainer in geo["trainers"])
                    rival = _learn_once(ground, best["mode"], dimension, seconds, best["rate"], geo["seed"], quick=quick)
                    yield {**rival, "kind": "row"}


def _learn_once(ground: Ground, mode: str, dimension: int, seconds: float, rate: float, seed: int, *, quick: bool) -> Entry:
    k_steps, configs = MODES[mode]
    arguments = [str(k_steps), str(dimension), str(seconds), json.dumps(configs), str(rate), str(seed)]
    losses: list[float] = []

    def measure() -> list[Entry]:
        folder = ground.job_folder()
        found = _words(ground, "learn.py", arguments, seconds, folder)
        losses.append(loss_of_server(folder / "checkpoint", dimension))
        shutil.rmtree(folder)
        return found

    trial = quietly(ground.testbed, measure, 1 if quick else TRIES)
    entry = {"part": "learn", "mode": mode, "dimension": dimension, "rate": rate, "seed": seed, "held_out": losses[-1]}
    return {**entry, "trainers": trial.value, **blocks_of(trial)}


def _words(ground: Ground, script: str, arguments: Sequence[str], seconds: float, folder: Path | None = None) -> list[Entry]:
    """What the trainers of one job wrote."""
    folder = folder or ground.job_folder()
    command = [str(HERE / script), str(folder), *arguments]
    run_on_hosts(ground.testbed, WORD_TRAINERS, command, folder / "log", patience_s=seconds + PATIENCE_S)
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("trainer*.json"))]


def loss_of_server(checkpoint: Path, dimension: int) -> float:
    """Held-out loss of the parameters that the server holds."""
    (path,) = checkpoint.glob("shard-*.npz")
    with np.load(path) as file:
        tensors = {name: torch.from_numpy(file[name]) for name in ("parameters.1", "parameters.2")}
    model = SkipGram(len(tensors["parameters.1"]), dimension)
    model.load_state_dict({"words.weight": tensors["parameters.1"], "contexts.weight": tensors["parameters.2"]})
    return held_out_loss(model)


def modes(rounds: int, *, quick: bool) -> Iterator[Entry]:
    """Every load in every round: one trainer alone, then four."""
    return measured_rounds(rounds, QUEUE_RATE, quick=quick)


PARTS: dict[str, Callable[..., Iterator[Entry]]] = {
    "queue": queue,
    "modes": modes,
    "speed": speed,
    "learn": learn,
    "rates": rates,
}


def main() -> None:
    """Measure, and print the tables of all that is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one short round, into a temporary file")
    parser.add_argument("--tables", action="store_true", help="print the tables of what is there, and measure nothing")
    parser.add_argument("--with-void", action="store_true", help="put what does not count into the tables, too")
    options = parser.parse_args()
    raw = Path(tempfile.gettempdir()) / "fleetbench_parameter_server_quick.jsonl" if options.quick else RAW
    for part in [] if options.tables else options.part:
        started = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        taken = {"started": started, "commit": commit(), "machine": machine(), "versions": versions(), "quick": options.quick}
        for entry in PARTS[part](1 if options.quick else options.rounds, quick=options.quick):
            with raw.open("a", encoding="utf-8") as out:
                out.write(
                    json.dumps({**entry, "at": f"{datetime.now(UTC):%H:%M:%S}", **(taken if entry["kind"] == "ground" else {})}) + "\n"
                )
            told = (
                "kind",
                "load",
                "closed",
                "case",
                "mode",
                "dimension",
                "rate",
                "seed",
                "round",
                "held_out",
                "throughput_ratio",
                "total_variation",
            )
            print(part, {name: entry[name] for name in (*told, "counts") if name in entry}, flush=True)
    tables([json.loads(line) for line in raw.read_text(encoding="utf-8").splitlines()], with_void=options.with_void)


if __name__ == "__main__":
    main()
