"""Outer differences in INT8 against FP32: bytes and time on a link of 50 Mbit/s, and the held-out loss.

From the repository's root, on a quiet machine and as root (for the testbed): ``python reports/diloco/int8.py``, about 5 minutes. Writes

- ``int8_bytes.csv``: what leaves the interfaces of 4 hosts while the character GPT trains, in 60 and in 180 exchanges;
- ``int8_wire.csv``: 4 hosts, emulated compute, the legs FP32 INT8 INT8 FP32 a round;
- ``int8_losses.csv``: the character GPT, AdamW, 4 ranks, K = 20, 500 updates, five seeds;

whichever is missing, and prints the tables; ``--tables`` prints them alone. ``--quick`` tries the chain in a temporary folder; its
figures mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "fidelity"))
from grid import Environment, Place  # noqa: E402  # of reports/fidelity
from ranks import run_ranks  # noqa: E402  # as above
from testbed import BLOCKS  # noqa: E402  # as above

from fleetbench.store import commit  # noqa: E402  # as above
from fleetbench.strategy import DistributedStrategy  # noqa: E402  # as above
from real.job.session import Session  # noqa: E402  # as above
from real.leg import Leg  # noqa: E402  # as above
from real.testbed.testbed import Testbed  # noqa: E402  # as above

RATE_MBIT, HOSTS, K_WIRE, STEPS, ROUNDS = 50, 4, 8, 64, 5
K_LOSS, UPDATES, SEEDS, RANKS = 20, 500, 5, 4
QUARTER = (1 + 4 / 256) / 4
"""Bytes of INT8 with a scale of four bytes a block of 256, as a share of FP32's."""
TOLERANCE = 0.02
EXCHANGES = 60
BYTES = ("commit", "wire", "exchanges", "bytes_at_interfaces", "parameters")
WIRE = ("commit", "round", "place", "wire", "ms_a_step", "bytes_sent", "counts")
LOSS = ("commit", "name", "seed", "update", "held_out", "ranks_agree", "bytes_sent")


def strategy(k: int, wire: str) -> DistributedStrategy:
    """Rounds of K updates with an outer optimizer."""
    configs = {"k_steps": k, "schedule": "torch", "begin_step": k, "outer_lr": 0.7, "outer_momentum": 0.9, "outer_wire": wire}
    return DistributedStrategy.from_dict({"localsgd": True, "localsgd_configs": configs})


def _environment() -> Environment:
    return Environment(name="int8", place=Place(nodes=HOSTS, per_node=1, rate_mbit=RATE_MBIT), strategies={}, workload=BLOCKS)


def measure_bytes(path: Path, exchanges: int) -> None:
    """Trainings of two lengths over each wire; what they differ by is what the further exchanges send."""
    cluster = _environment().experiment(strategy(1, "fp32"), 1).cluster
    with path.open("w", newline="", encoding="utf-8") as out, Testbed(cluster) as testbed:
        rows = csv.DictWriter(out, BYTES)
        rows.writeheader()
        for wire in ("fp32", "int8"):
            for number in (exchanges, 3 * exchanges):
                before = _at_interfaces(testbed)
                training = {"name": wire, "seed": 0, "strategy": strategy(1, wire).changes()}
                job = {"updates": number, "every": number, "trainings": [training]}
                found = run_ranks(HERE / "gpt_rank.py", HOSTS, job, testbed=testbed)[-1]
                left = _at_interfaces(testbed) - before
                rows.writerow(
                    {"commit": commit(), "wire": wire, "exchanges": number, "bytes_at_interfaces": left, "parameters": found["parameters"]}
                )


def _at_interfaces(testbed: Testbed) -> int:
    """Bytes that have left all hosts' interfaces, headers included."""
    network, total = testbed._built, 0  # noqa: SLF001  # its own counters are of packets
    for host in testbed.topology.hosts:
        with network.inside(host):
            lines = Path("/proc/thread-self/net/dev").read_text(encoding="ascii").splitlines()[2:]
        total += sum(int(line.partition(":")[2].split()[8]) for line in lines if not line.strip().startswith("lo:"))
    return total


def measure_wire(path: Path, rounds: int, steps: int) -> None:
    """Legs in turns, in one launch."""
    with (
        path.open("w", newline="", encoding="utf-8") as out,
        Session(_environment().experiment(strategy(K_WIRE, "fp32"), steps)) as session,
    ):
        rows = csv.DictWriter(out, WIRE)
        rows.writeheader()
        for number in range(rounds):
            order = ["fp32", "int8", "int8", "fp32"]
            for place, wire in enumerate(order if number % 2 == 0 else [{"fp32": "int8", "int8": "fp32"}[name] for name in order]):
                run = session.run(Leg(strategy=strategy(K_WIRE, wire), steps=steps, warmup_steps=0))
                summary = dataclasses.asdict(run.summary)
                took, counts = f"{1e3 * summary['wall_s'] / summary['steps']:.3f}", (summary["testbed"] or {}).get("counts", False)
                entry = {"round": number, "place": place, "wire": wire, "ms_a_step": took, "bytes_sent": summary["bytes_sent_per_trainer"]}
                rows.writerow({"commit": commit(), "counts": counts, **entry})
                out.flush()
                for noted in summary["skipped"]:
                    if noted["what"].endswith("outer_wire"):
                        print(noted["why"], flush=True)


def measure_losses(path: Path, seeds: int, updates: int) -> None:
    """Both wires from every seed, in turns."""
    todo = [
        {"name": wire, "seed": seed, "strategy": strategy(K_LOSS, wire).changes()} for seed in range(seeds) for wire in ("fp32", "int8")
    ]
    found = run_ranks(HERE / "gpt_rank.py", RANKS, {"updates": updates, "every": updates, "trainings": todo})
    with path.open("w", newline="", encoding="utf-8") as out:
        rows = csv.DictWriter(out, LOSS, restval="", extrasaction="ignore")
        rows.writeheader()
        rows.writerows({"commit": commit(), **entry} for entry in found)


def show(folder: Path) -> None:
    """Print both tables."""
    sent = {(row["wire"], int(row["exchanges"])): int(row["bytes_at_interfaces"]) for row in _read(folder / "int8_bytes.csv")}
    numbers = sorted({number for _, number in sent})
    slope = {wire: (sent[wire, numbers[1]] - sent[wire, numbers[0]]) / (numbers[1] - numbers[0]) for wire in ("fp32", "int8")}
    share = slope["int8"] / slope["fp32"]
    verdict = "PASS" if abs(share / QUARTER - 1) <= TOLERANCE else "MISS"
    print(f"bytes at all interfaces an exchange: FP32 {slope['fp32']:,.0f}, INT8 {slope['int8']:,.0f}, {share:.4f} of it")
    print(f"a quarter plus scales is {QUARTER:.4f}: {share / QUARTER - 1:+.1%}, {verdict}\n")
    wire = _read(folder / "int8_wire.csv")
    print("| wire | ms a step, median [min, max] | n | MB a leg and trainer, by our count |\n|---|---|---|---|")
    for name in ("fp32", "int8"):
        own = [row for row in wire if row["wire"] == name and row["counts"] == "True"]
        times, counted = [float(row["ms_a_step"]) for row in own], statistics.median(int(row["bytes_sent"]) for row in own)
        print(f"| {name} | {statistics.median(times):.2f} [{min(times):.2f}, {max(times):.2f}] | {len(own)} | {counted / 1e6:.3f} |")
    print(f"\n{sum(row['counts'] == 'False' for row in wire)} of {len(wire)} legs void\n")
    rows = _read(folder / "int8_losses.csv")
    if any(row["ranks_agree"] == "False" for row in rows):
        raise SystemExit("ranks end with different parameters")
    losses = {(row["name"], row["seed"]): float(row["held_out"]) for row in rows if row["held_out"]}
    seeds = sorted({seed for _, seed in losses})
    print("| seed | FP32 | INT8 | difference |\n|---|---|---|---|")
    for seed in seeds:
        print(f"| {seed} | {losses['fp32', seed]:.4f} | {losses['int8', seed]:.4f} | {losses['int8', seed] - losses['fp32', seed]:+.4f} |")
    apart = statistics.mean(losses["int8", seed] - losses["fp32", seed] for seed in seeds)
    spread = statistics.stdev(losses["fp32", seed] for seed in seeds) if len(seeds) > 1 else float("nan")
    print(f"\nmean difference {apart:+.4f}; standard deviation of FP32 over seeds {spread:.4f} (n = {len(seeds)})")


def _read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def main() -> None:
    """Measure, then show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tables", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp()) if options.quick else HERE
    if not options.tables:
        parts = (
            (measure_bytes, "int8_bytes.csv", (5 if options.quick else EXCHANGES,)),
            (measure_wire, "int8_wire.csv", (1, 16) if options.quick else (ROUNDS, STEPS)),
            (measure_losses, "int8_losses.csv", (1, 40) if options.quick else (SEEDS, UPDATES)),
        )
        for part, name, sizes in parts:
            if not (folder / name).exists():
                part(folder / name, *sizes)
    show(folder)


if __name__ == "__main__":
    main()
