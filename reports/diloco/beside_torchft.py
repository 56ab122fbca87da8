"""DiLoCo beside torchft's: step time and peak memory of the same model, in one launch and in turns.

From the repository's root: ``python reports/diloco/beside_torchft.py --torchft FOLDER`` on 2 ranks over gloo; FOLDER is the
``site-packages`` of a virtual environment into which ``pip install torchft-nightly`` was run by hand, beside the same torch; without it
torchft's arms are skipped. The model has 242 small tensors. K = 4 and 32, P = 1 and 2; every round is a launch in which the arms
run in the order A B C D D C B A. Appends to ``beside_torchft.csv`` and prints the table; ``--tables`` prints it alone; about 14 minutes.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import tempfile
from pathlib import Path

from ranks import run_ranks

from fleetbench.store import commit
from real.testbed import noise

HERE = Path(__file__).parent
ARMS = ("ours", "torchft", "torchft, buckets", "loop")
CASES = ((4, 1), (4, 2), (32, 1), (32, 2))
"""K and P."""
ROUNDS, STEPS, QUIET_CORES = 3, 192, 0.15
COLUMNS = ("commit", "k", "p", "round", "place", "arm", "step_s", "peak_bytes", "distance", "ranks_agree", "skipped", "foreign_cores")
SAME = 1e-3
"""Share of the way that training went, by which arms of one algorithm may be apart in float32."""


def measure(path: Path, torchft: str, rounds: int, cases: tuple[tuple[int, int], ...], steps: int) -> None:
    """Launch by launch."""
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as out:
        rows = csv.DictWriter(out, COLUMNS, restval="")
        if fresh:
            rows.writeheader()
        for number in range(rounds):
            order = [*ARMS[number % len(ARMS) :], *ARMS[: number % len(ARMS)]]
            for k, p in cases:
                before = noise.read({})
                job = {
                    "torchft": torchft,
                    "k": k,
                    "p": p,
                    "rounds": max(2, steps // k),
                    "order": [*order, *reversed(order)],
                    "alone": False,
                }
                found = run_ranks(HERE / "beside_rank.py", 2, job, timeout_s=600.0)
                foreign = noise.between(before, noise.read({})).foreign_cores
                for entry in found:
                    known = {name: value for name, value in entry.items() if name in COLUMNS}
                    rows.writerow({"commit": commit(), "k": k, "p": p, "round": number, "foreign_cores": f"{foreign:.3f}", **known})
                out.flush()


def measure_memory(path: Path, torchft: str, cases: tuple[tuple[int, int], ...]) -> None:
    """Every arm in a process of its own, so that no memory of another is used again."""
    with path.open("w", newline="", encoding="utf-8") as out:
        rows = csv.DictWriter(out, ("commit", "k", "p", "arm", "peak_bytes", "skipped"), restval="", extrasaction="ignore")
        rows.writeheader()
        for k, p in cases:
            for arm in ARMS * 3:
                job = {"torchft": torchft, "k": k, "p": p, "rounds": 2, "order": [arm], "alone": True}
                rows.writerow({"commit": commit(), "k": k, "p": p, **run_ranks(HERE / "beside_rank.py", 2, job, timeout_s=600.0)[0]})
            out.flush()


def show_memory(path: Path) -> None:
    """Print the table of what arms add to the resident memory."""
    with path.open(encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["peak_bytes"]]
    print("\n| K | P | arm | MB at the peak, median [min, max] | n |\n|---|---|---|---|---|")
    for k, p, arm in dict.fromkeys((row["k"], row["p"], row["arm"]) for row in rows):
        taken = [float(row["peak_bytes"]) / 1e6 for row in rows if (row["k"], row["p"], row["arm"]) == (k, p, arm)]
        print(f"| {k} | {p} | {arm} | {statistics.median(taken):.1f} [{min(taken):.1f}, {max(taken):.1f}] | {len(taken)} |")


def show(path: Path) -> None:
    """Print the table."""
    with path.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    print("| K | P | arm | ms a step, median [min, max] | n | how many times ours | as the loop trains | ranks agree |")
    print("|---|---|---|---|---|---|---|---|")
    for k, p in dict.fromkeys((row["k"], row["p"]) for row in rows):
        own = [row for row in rows if (row["k"], row["p"]) == (k, p)]
        base = _by_round(own, "ours")
        for arm in dict.fromkeys(row["arm"] for row in own):
            taken = [row for row in own if row["arm"] == arm and row["step_s"]]
            if not taken:
                print(f"| {k} | {p} | {arm} | skipped: {next(row['skipped'] for row in own if row['arm'] == arm)} | | | | |")
                continue
            times = [1e3 * float(row["step_s"]) for row in taken]
            ratios = [math.log(took / base[number]) for number, took in _by_round(own, arm).items() if number in base]
            ratio = f"{math.exp(statistics.median(ratios)):.2f}x [{math.exp(min(ratios)):.2f}, {math.exp(max(ratios)):.2f}]"
            far = max(float(row["distance"]) for row in taken)
            agree = "yes" if all(row["ranks_agree"] == "True" for row in taken) else "NO"
            print(
                f"| {k} | {p} | {arm} | {statistics.median(times):.2f} [{min(times):.2f}, {max(times):.2f}] | {len(times)} | {ratio} "
                f"| {'yes' if far < SAME else 'NO'} ({far:.0e}) | {agree if p == '1' else 'one fragment alone'} |"
            )
    noisy = {(row["round"], row["k"], row["p"]) for row in rows if float(row["foreign_cores"]) > QUIET_CORES}
    print(f"\n{len(noisy)} launches during which other programs took more than {QUIET_CORES} of a core")


def _by_round(rows: list[dict[str, str]], arm: str) -> dict[str, float]:
    """Mean of an arm's two blocks, by round."""
    times: dict[str, list[float]] = {}
    for row in rows:
        if row["arm"] == arm and row["step_s"]:
            times.setdefault(row["round"], []).append(float(row["step_s"]))
    return {number: statistics.mean(of) for number, of in times.items()}


def main() -> None:
    """Measure, then show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchft", default="", help="site-packages of an environment that has torchft")
    parser.add_argument("--quick", action="store_true", help="one round of few steps, whose figures mean nothing")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--memory", action="store_true", help="measure the memory alone")
    options = parser.parse_args()
    path = Path(tempfile.mkdtemp()) / "beside_torchft.csv" if options.quick else HERE / "beside_torchft.csv"
    if not (options.tables or options.memory):
        measure(
            path, options.torchft, 1 if options.quick else ROUNDS, CASES[:2] if options.quick else CASES, 16 if options.quick else STEPS
        )
    if not options.tables:
        measure_memory(path.with_name("memory.csv"), options.torchft, CASES[:2])
    show(path)
    show_memory(path.with_name("memory.csv"))


if __name__ == "__main__":
    main()
