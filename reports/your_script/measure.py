"""Measure what docs/your_script.md claims, on this machine's processors. Nothing else should run meanwhile.

Run from the repository's root: ``python reports/your_script/measure.py [PART ...]``; without a name, all parts:

- ``switching``: a strategy's step time in a leg that follows another strategy's, in a launch of its own under the same driver, and in
  an ordinary launch, which keeps no times;
- ``parameters``: legs of several strategies in one script, and a loop that does the same by hand;
- ``alone``: a plain torch loop, the same in a process group, with ``import fleetbench`` and ``fleet.init``, and with all four lines;
- ``profiler``: steps in a leg that profiles, and in one that exchanges no more than it does;
- ``verdicts``: ``fleetbench tune`` of two scripts, and runs with what it recommends.

What is measured is appended to ``raw.jsonl``, void or not; ``tables.py`` prints the tables of README.md from that file.
``--quick`` checks in a few minutes that all of it runs; its figures go to ``--raw`` FILE alone, and mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
import train
from torch.nn.functional import cross_entropy

from fleetbench.experiment import Experiment
from fleetbench.measurements import FOREIGN_LIMIT
from fleetbench.store import machine, versions
from fleetbench.strategy import DistributedStrategy
from real.job.script_session import RECORD, ScriptSession
from real.leg import Leg
from real.testbed import noise

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RAW = HERE / "raw.jsonl"
TORCHRUN = (sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
BLOCK = 20
"""Steps of which a mean is taken: a multiple of every K. A leg's figure is the median of its blocks."""
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "a bucket a gradient": {"fuse_all_reduce_ops": False},
    "K = 4": {"localsgd": True, "localsgd_configs": {"k_steps": 4}},
    "merge 4": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 4}},
    "two communicators": {"fuse_grad_size_in_MB": 0.125, "nccl_comm_num": 2, "sync_nccl_allreduce": False},
    "fused update": {"build_strategy": {"fuse_all_optimizer_ops": True}},
}
CHAIN = (
    "default", "a bucket a gradient", "K = 4", "default", "merge 4", "a bucket a gradient", "default",
    "two communicators", "K = 4", "merge 4", "fused update", "default",
)  # fmt: skip
SEQUENCE = (
    ("a bucket a gradient", 4),
    ("K = 3", 8),
    ("merge 2", 6),
    ("fused update", 5),
    ("K = 3", 7),
    ("default", 4),
)
"""Legs of ``parameters``, with their steps."""
SHORT: Mapping[str, Mapping[str, Any]] = {
    "K = 3": {"localsgd": True, "localsgd_configs": {"k_steps": 3}},
    "merge 2": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
}
NO_EXCHANGE: Mapping[str, Any] = {"localsgd": True, "localsgd_configs": {"k_steps": 100_000}}
Entry = dict[str, Any]


class Measurement:
    """Appends entries, each with where, when and how quiet it was."""

    def __init__(self, raw: Path, *, quick: bool) -> None:
        self.raw = raw
        self.quick = quick
        self.steps = 60 if quick else 400
        self.warmup_steps = 20

    def note(self, part: str, measure: Callable[[], Entry]) -> None:
        """Measure, and append."""
        before, begin = noise.read({}), time.monotonic()
        entry = measure()
        foreign = noise.between(before, noise.read({})).foreign_cores
        head = {"part": part, "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}", "machine": machine(), "torch": versions()["torch"]}
        quiet = {"took_s": round(time.monotonic() - begin, 1), "foreign_cores": round(foreign, 3), "void": foreign > FOREIGN_LIMIT}
        with self.raw.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**head, "quick": self.quick, **quiet, **entry}) + "\n")
        print(part, quiet, {name: value for name, value in entry.items() if not isinstance(value, list | dict)}, flush=True)


def of_blocks(stamps: np.ndarray, first: int, steps: int) -> float:
    """Milliseconds a step, of steps ``first`` to ``first + steps``, but for the last: there a script may wait for its next order."""
    took = np.diff(stamps[first - 1 : first + steps - 1])
    blocks = took[: len(took) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(axis=1)
    return float(np.median(blocks)) * 1e-6


def strategy_file(fields: Mapping[str, Any], folder: Path) -> Path:
    """A file that a script loads."""
    path = folder / "strategy.toml"
    path.write_text(tomli_w.dumps({"strategy": DistributedStrategy.from_dict(dict(fields)).changes()}), encoding="utf-8")
    return path


def launched(fields: Mapping[str, Any], steps: int, warmup_steps: int) -> float:
    """Milliseconds a step of an ordinary launch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = [str(HERE / "train.py"), str(steps + warmup_steps + 1), str(strategy_file(fields, folder))]
        environment = {**os.environ, "STAMPS": str(folder / "stamps.npy")}
        subprocess.run([*TORCHRUN, *words], check=True, capture_output=True, env=environment, cwd=ROOT)
        return of_blocks(np.load(folder / "stamps.npy"), warmup_steps, steps)


def in_one_launch(
    legs: list[Leg | None], extra: Mapping[str, str], folder: Path, own: Mapping[str, Any] | None = None
) -> tuple[np.ndarray, list[float]]:
    """The script's own stamps over legs in one launch, and what the legs themselves say, in ms; ``None`` is a leg of layer times.

    ``own`` is the strategy that the script itself asks for.
    """
    words = [str(HERE / "train.py"), "1000000", *([] if own is None else [str(strategy_file(own, folder))])]
    os.environ.update(extra | {"STAMPS": str(folder / "stamps.npy")})
    said = []
    try:
        with ScriptSession([*TORCHRUN, *words], Experiment(name="train")) as session:
            for leg in legs:
                if leg is None:
                    session.run_profile(Leg(strategy=DistributedStrategy(), steps=200, warmup_steps=20, profile=True, max_s=60.0))
                else:
                    summary = session.run(leg).summary
                    said.append(summary.wall_s / summary.steps * 1e3)
        assert not session.notes, session.notes
    finally:
        for name in (*extra, "STAMPS"):
            del os.environ[name]
    return np.load(folder / "stamps.npy"), said


def whole_run(fields: Mapping[str, Any], script: Path) -> float:
    """Seconds from the first to the last epoch's line in the log of an ordinary launch."""
    with tempfile.TemporaryDirectory() as name:
        words = [*TORCHRUN, str(script), str(strategy_file(fields, Path(name)))]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment) as process:
            assert process.stdout is not None
            at_s = [time.monotonic() for line in process.stdout if line.startswith("[Epoch")]
        assert process.returncode == 0
        return at_s[-1] - at_s[0]


def leg_of(fields: Mapping[str, Any], steps: int, warmup_steps: int) -> Leg:
    """A leg under a strategy."""
    return Leg(strategy=DistributedStrategy.from_dict(dict(fields)), steps=steps, warmup_steps=warmup_steps)


def recorded_steps() -> int:
    """Steps before the first leg of a session."""
    return RECORD.leg.warmup_steps + RECORD.leg.steps


def switching(measurement: Measurement) -> None:
    """Rounds of a launch of every strategy, ordinary and under the driver, and one launch that carries the chain, in mirrored orders."""
    steps, warmup_steps = measurement.steps, measurement.warmup_steps

    def alone() -> Entry:
        return {"kind": "launches", "ms": {name: launched(fields, steps, warmup_steps) for name, fields in STRATEGIES.items()}}

    def fresh_ms(fields: Mapping[str, Any]) -> float:
        with tempfile.TemporaryDirectory() as folder:
            stamps, _ = in_one_launch([leg_of(fields, steps, warmup_steps)], {}, Path(folder), fields)
        return of_blocks(stamps, recorded_steps() + warmup_steps, steps)

    def fresh() -> Entry:
        return {"kind": "fresh", "ms": {name: fresh_ms(fields) for name, fields in STRATEGIES.items()}}

    def living() -> Entry:
        with tempfile.TemporaryDirectory() as folder:
            legs: list[Leg | None] = [leg_of(STRATEGIES[name], steps, warmup_steps) for name in CHAIN]
            stamps, said = in_one_launch(legs, {}, Path(folder))
        assert len(stamps) == recorded_steps() + len(CHAIN) * (steps + warmup_steps)
        firsts = [recorded_steps() + number * (steps + warmup_steps) + warmup_steps for number in range(len(CHAIN))]
        return {"kind": "legs", "chain": list(CHAIN), "ms": [of_blocks(stamps, first, steps) for first in firsts], "said_ms": said}

    for number in range(1 if measurement.quick else 5):
        for measure in (alone, fresh, living) if number % 2 == 0 else (living, fresh, alone):
            measurement.note("switching", lambda measure=measure, number=number: {"round": number} | measure())


def parameters(measurement: Measurement) -> None:
    """The largest difference of any parameter behind any step."""

    def measure() -> Entry:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            known = {**STRATEGIES, **SHORT}
            legs: list[Leg | None] = [leg_of(known[strategy], steps, 0) for strategy, steps in SEQUENCE]
            in_one_launch(legs, {"HISTORY": str(folder / "history")}, folder)
            found = np.stack([np.load(folder / f"history{rank}.npy") for rank in range(2)])
        expected = by_hand()
        assert found.shape == expected.shape, (found.shape, expected.shape)
        apart = float(np.abs(expected[0] - expected[1]).max())
        return {
            "legs": [["default", recorded_steps()], *map(list, SEQUENCE)],
            "steps": found.shape[1],
            "parameters": found.shape[2],
            "largest_difference": float(np.abs(found - expected).max()),
            "largest_parameter": float(np.abs(expected).max()),
            "ranks_apart": apart,
        }

    measurement.note("parameters", measure)


def by_hand() -> np.ndarray:
    """``(ranks, steps, parameters)``: the legs of ``parameters`` without fleetbench, in one process, with a network a rank."""
    networks = [train.network(torch.float64, 32) for _ in range(2)]
    optimizers = [train.optimizer_of(network) for network in networks]
    history: list[list[np.ndarray]] = [[], []]
    done = 0
    for name, steps in (("default", recorded_steps()), *SEQUENCE):
        every = int(name[-1]) if name.startswith(("K", "merge")) else 1
        for step in range(1, steps + 1):
            for rank, network in enumerate(networks):
                data, target = train.batch(done, rank, 2, torch.float64)
                cross_entropy(network(data), target).backward()  # a merge's gradients add up in .grad
            done += 1
            pairs = list(zip(*(network.parameters() for network in networks), strict=True))
            is_update = not name.startswith("merge") or step % every == 0
            if not name.startswith("K") and is_update:
                average([[parameter.grad for parameter in pair] for pair in pairs], every)
            for optimizer in optimizers if is_update else ():
                optimizer.step()
                optimizer.zero_grad()
            if name.startswith("K") and ((step - 1) % every == 0 or step == steps):
                average(pairs, 1)
            if name.startswith("K") and step == steps:  # behind a leg all have rank 0's momentum
                for one, other in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
                    other["momentum_buffer"].copy_(one["momentum_buffer"])
            for network, told in zip(networks, history, strict=True):
                told.append(torch.cat([parameter.detach().flatten() for parameter in network.parameters()]).numpy())
    return np.array(history)


@torch.no_grad()
def average(pairs: Any, divisor: int) -> None:
    """Both of a pair become their mean over ranks, divided once more."""
    for pair in pairs:
        mean = torch.stack(list(pair)).mean(dim=0) / divisor
        for tensor in pair:
            tensor.copy_(mean)


def alone(measurement: Measurement) -> None:
    """Plain torch, a process group, ``fleet.init``, and four lines, in turns: one process, and two that each train by themselves."""
    steps = 400 if measurement.quick else 3000

    def measure(variant: str, processes: int) -> float:
        start = [sys.executable, "-P"] if processes == 1 else list(TORCHRUN)
        words = [*start, str(HERE / "alone.py"), variant, str(steps)]
        done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=ROOT)
        line = next(line for line in done.stdout.splitlines() if line.startswith("["))
        return of_blocks(np.array(json.loads(line)), steps // 4, steps - steps // 4)

    for processes, variants in ((1, ("plain", "init", "four")), (2, ("plain", "joined", "init"))):
        for number in range(1 if measurement.quick else 4):
            order = variants if number % 2 == 0 else variants[::-1]
            measurement.note(
                "alone", lambda order=order, processes=processes: {"processes": processes, "ms": {v: measure(v, processes) for v in order}}
            )


def profiler(measurement: Measurement) -> None:
    """Legs without any exchange and legs of layer times, in turns, in one launch."""
    steps, warmup_steps, turns = measurement.steps, measurement.warmup_steps, 2 if measurement.quick else 5

    def measure() -> Entry:
        with tempfile.TemporaryDirectory() as folder:
            stamps, _ = in_one_launch([leg_of(NO_EXCHANGE, steps, warmup_steps), None] * turns, {}, Path(folder))
        profiled = (len(stamps) - recorded_steps()) // turns - steps - warmup_steps
        assert recorded_steps() + turns * (steps + warmup_steps + profiled) == len(stamps)
        quiet, hooked, first = [], [], recorded_steps()
        for _ in range(turns):
            quiet.append(of_blocks(stamps, first + warmup_steps, steps))
            first += steps + warmup_steps
            hooked.append(of_blocks(stamps, first + warmup_steps, profiled - warmup_steps))
            first += profiled
        return {"steps": profiled, "quiet_ms": quiet, "profiled_ms": hooked}

    measurement.note("profiler", measure)


def verdicts(measurement: Measurement) -> None:
    """Two scripts are tuned by the command; then runs with and without what is recommended, in turns."""
    quick = ["--set", "tune.pairs=2", "--set", "tune.trials=6", "--set", "tune.leg_steps=20"] if measurement.quick else []
    target = ["--set", "workload.target_loss=0.2", "--set", "workload.steps=280"]
    for name, extra in (("train_digits.py", []), ("accumulation.py", target)):
        script = ROOT / "examples" / name
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-P",
                "-m",
                "fleetbench",
                "tune",
                "--json",
                "--out",
                folder,
                *quick,
                *extra,
                "--",
                *TORCHRUN,
                str(script),
            ]

            def tuned(command: list[str] = command, name: str = name) -> Entry:
                begin = time.monotonic()
                done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
                return {"script": name, "tune_s": round(time.monotonic() - begin, 1), "recommendation": json.loads(done.stdout)}

            measurement.note("verdicts", tuned)
            (path,) = Path(folder).glob("*-tune-*/recommended.toml")
            fields = DistributedStrategy.load(path).changes()
        if fields:

            def again(fields: dict[str, Any] = fields, name: str = name, script: Path = script) -> Entry:
                took = [[whole_run(which, script) for which in ({}, fields)] for _ in range(1 if measurement.quick else 4)]
                return {"script": name, "again_s": took}

            measurement.note("verdicts", again)


PARTS = {"switching": switching, "parameters": parameters, "alone": alone, "profiler": profiler, "verdicts": verdicts}


def main() -> None:
    """Measure the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--raw", type=Path, default=RAW)
    arguments = parser.parse_args()
    if arguments.quick and arguments.raw == RAW:
        parser.error("--quick needs --raw FILE: its figures mean nothing")
    for part in arguments.parts or PARTS:
        PARTS[part](Measurement(arguments.raw, quick=arguments.quick))


if __name__ == "__main__":
    main()
