"""Is the testbed a network? Gloo's all-reduces on it against the closed form, idle and back to back, and the machine's ceiling.

Run from the repository's root: ``python reports/testbed/measure.py [--rounds N] [--part NAME ...]``. Every part's raw
results go to ``raw.jsonl`` as they come, void measurements included; the tables of README.md are printed from that file.
``unshare --map-root-user --net python reports/testbed/measure.py --part user_namespace`` is the part without root's rights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ranks import Ranks, reshape

from fleetbench.cluster import Cluster, Link
from fleetbench.quantities import BitsPerSecond
from fleetbench.store import machine, versions
from real.testbed.network import is_rootless
from real.testbed.noise import FOREIGN_LIMIT, Trial, between, quietly, read
from real.testbed.testbed import Testbed
from real.testbed.topology import wire_s

RAW = Path(__file__).parent / "raw.jsonl"
RATES_MBIT = (50, 100, 200)
HOSTS = (3, 4)
SIZES = (50_000, 100_000, 250_000, 500_000, 1_000_000, 4_000_000)
IDLE_S = 0.02
SHARED_BYTES = 500_000
LARGE_BYTES = 1_000_000
"""Largest message that alpha is fitted to; larger ones are only checked."""
TOLERANCE = 0.03
LARGE_TOLERANCE = 0.05
PATIENCE_S = 600.0
MBIT = 10**6
Entry = dict[str, Any]


def all_reduces(rounds: int, *, hosts: tuple[int, ...] = HOSTS) -> Iterator[Entry]:
    """Every number of hosts and rate, back to back and idle in turns, ``rounds`` times."""
    for count in hosts:
        cluster = Cluster(nodes=count, inter=Link(bandwidth=BitsPerSecond(RATES_MBIT[0] * MBIT)))
        with _folder() as folder, Testbed(cluster) as testbed, Ranks(testbed, Path(folder)) as ranks:
            for number in range(rounds):
                for rate in RATES_MBIT:
                    reshape(testbed, rate * MBIT)
                    links = [asdict(link) for link in testbed.verify()]
                    ranks.open()
                    for idle_s in (0.0, IDLE_S) if number % 2 == 0 else (IDLE_S, 0.0):
                        _await_quiet()
                        trial = quietly(testbed, lambda rate=rate, idle_s=idle_s: ranks.medians(rate * MBIT, sizes=SIZES, idle_s=idle_s))
                        yield {
                            "hosts": count,
                            "rate_mbit": rate,
                            "idle_s": idle_s,
                            "round": number,
                            "rootless": is_rootless(),
                            "links": links,
                            **_times(trial),
                        }


def sharing(rounds: int) -> Iterator[Entry]:
    """Two nodes of two trainers: pairs across the link, alone and both at once; and all four in one ring, which crosses it once."""
    cluster = Cluster(nodes=2, trainers_per_node=2, inter=Link(bandwidth=BitsPerSecond(100 * MBIT)))
    with _folder() as folder, Testbed(cluster) as testbed:
        testbed.verify()
        places = {"one pair": (["host0", "host1"], [[0, 1]]), "two pairs": (["host0", "host0", "host1", "host1"], [[0, 2], [1, 3]])}
        places["one ring of four"] = (["host0", "host0", "host1", "host1"], [[0, 1, 2, 3]])
        for name, (where, groups) in places.items():
            with Ranks(testbed, Path(folder), where) as ranks:
                ranks.open(groups)
                for number in range(rounds):
                    _await_quiet()
                    trial = quietly(
                        testbed, lambda ranks=ranks: {SHARED_BYTES: statistics.median(ranks.all_reduce(SHARED_BYTES, rounds=15))}
                    )
                    yield {"what": name, "round": number, **_times(trial)}


def _await_quiet() -> None:
    """Wait until others have left the cores alone for two seconds, ten minutes at most: what is measured after that is void by itself."""
    quiet, deadline = 0, time.monotonic() + PATIENCE_S
    before = read({})
    while quiet < 2 and time.monotonic() < deadline:
        time.sleep(1.0)
        after = read({})
        quiet = quiet + 1 if between(before, after).foreign_cores < FOREIGN_LIMIT else 0
        before = after


def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fleetbench-")


def _times(trial: Trial[dict[int, float]]) -> Entry:
    return {
        "times_s": {str(nbytes): time_s for nbytes, time_s in trial.value.items()},
        "counts": trial.counts,
        "num_void": trial.num_void,
        "blocks": [asdict(block) for block in trial.blocks],
    }


PARTS: dict[str, Callable[[int], Iterator[Entry]]] = {
    "all_reduces": all_reduces,
    "sharing": sharing,
    "user_namespace": lambda rounds: all_reduces(rounds, hosts=(4,)),
}


def measure(parts: list[str], rounds: int) -> None:
    """Append every result to the raw file as it comes."""
    with RAW.open("a", encoding="utf-8") as raw:
        for part in parts:
            taken = {"part": part, "started": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": machine(), "versions": versions()}
            for entry in PARTS[part](rounds):
                raw.write(json.dumps({**taken, **entry}) + "\n")
                raw.flush()
                print(
                    part,
                    {key: entry[key] for key in ("hosts", "rate_mbit", "idle_s", "what", "round", "counts") if key in entry},
                    flush=True,
                )


def tables() -> None:
    """The tables of README.md, from the raw file; void measurements are counted and left out."""
    entries = [json.loads(line) for line in RAW.read_text(encoding="utf-8").splitlines()]
    for part in ("all_reduces", "user_namespace"):
        _all_reduce_table(part, [entry for entry in entries if entry["part"] == part])
    _sharing_table([entry for entry in entries if entry["part"] == "sharing"])
    _ceiling_table([entry for entry in entries if entry["part"] == "ceilings"])


def _all_reduce_table(part: str, entries: list[Entry]) -> None:
    if not entries:
        return
    print(f"\n{part}: largest |error| against alpha + wire, one alpha a rate for both columns; n is of measurements that count\n")
    print("| hosts | Mbit/s | n | void | alpha, ms | 100 kB to 1 MB, back to back | after 20 ms idle | 4 MB | idle / back to back "
          "| reorderings | timeouts | holds |\n|---|---|---|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    for hosts, rate in sorted({(entry["hosts"], entry["rate_mbit"]) for entry in entries}):
        cell = [entry for entry in entries if (entry["hosts"], entry["rate_mbit"]) == (hosts, rate)]
        good = [entry for entry in cell if entry["counts"]]
        void = sum(entry["num_void"] for entry in cell)
        if not {0.0, IDLE_S} <= {entry["idle_s"] for entry in good}:
            print(f"| {hosts} | {rate} | {len(good)} | {void} | nothing that counts |")
            continue
        medians = {idle: _medians([entry for entry in good if entry["idle_s"] == idle]) for idle in (0.0, IDLE_S)}
        joint = {nbytes: statistics.mean((medians[0.0][nbytes], medians[IDLE_S][nbytes])) for nbytes in SIZES if nbytes >= 100_000}
        alpha = fit_alpha_s(joint, hosts, rate * MBIT)
        errors = {
            idle: {nbytes: time_s / (alpha + wire_s(nbytes, hosts, rate * MBIT)) - 1 for nbytes, time_s in times.items()}
            for idle, times in medians.items()
        }
        middle = [nbytes for nbytes in joint if nbytes <= LARGE_BYTES]
        worst = {idle: max((found[nbytes] for nbytes in middle), key=abs) for idle, found in errors.items()}
        large = max((found[4_000_000] for found in errors.values()), key=abs)
        ratios = [medians[IDLE_S][nbytes] / medians[0.0][nbytes] for nbytes in middle]
        noise = [entry["blocks"][-1]["noise"] for entry in good]
        holds = max(map(abs, worst.values())) <= TOLERANCE and abs(large) <= LARGE_TOLERANCE
        print(
            f"| {hosts} | {rate} | {len(good)} | {void} | {1e3 * alpha:.2f} | {_percent(worst[0.0])} | {_percent(worst[IDLE_S])} "
            f"| {_percent(large)} | {min(ratios):.3f} to {max(ratios):.3f} | {sum(n['reorders'] for n in noise)} "
            f"| {sum(n['timeouts'] for n in noise)} | {'yes' if holds else 'NO'} |"
        )


def fit_alpha_s(times_s: dict[int, float], hosts: int, rate_bps: float) -> float:
    """The alpha of times by bytes; least squares of relative errors, over the messages of at most 1 MB."""
    weights = {nbytes: time_s**-2 for nbytes, time_s in times_s.items() if nbytes <= LARGE_BYTES}
    excess = sum(weight * (times_s[nbytes] - wire_s(nbytes, hosts, rate_bps)) for nbytes, weight in weights.items())
    return excess / sum(weights.values())


def _medians(entries: list[Entry]) -> dict[int, float]:
    return {nbytes: statistics.median(entry["times_s"][str(nbytes)] for entry in entries) for nbytes in SIZES}


def _sharing_table(entries: list[Entry]) -> None:
    if not entries:
        return
    print(
        "\nsharing: 2 nodes of 2 trainers, 100 Mbit/s, all-reduces of 500 kB\n\n| who | n | void | ms | wire, ms |\n|---|---|---|---|---|"
    )
    wires = {
        "one pair": wire_s(SHARED_BYTES, 2, 100 * MBIT),
        "two pairs": 2 * wire_s(SHARED_BYTES, 2, 100 * MBIT),  # each pair's bytes share the link
        "one ring of four": wire_s(SHARED_BYTES, 4, 100 * MBIT),
    }
    for name, wire in wires.items():
        found = [entry for entry in entries if entry["what"] == name]
        good = [entry["times_s"][str(SHARED_BYTES)] for entry in found if entry["counts"]]
        median = f"{1e3 * statistics.median(good):.2f}" if good else "nothing that counts"
        print(f"| {name} | {len(good)} | {sum(entry['num_void'] for entry in found)} | {median} | {1e3 * wire:.2f} |")


def _ceiling_table(entries: list[Entry]) -> None:
    if not entries:
        return
    print("\nceilings\n\n| hosts | ceiling | carried | failed |\n|---|---|---|---|")
    for entry in entries:
        carried = " ".join(f"{point['rate_bps'] // MBIT}" for point in entry["points"] if point["carries"])
        failed = "; ".join(f"{point['rate_bps'] // MBIT}: {point['why']}" for point in entry["points"] if not point["carries"])
        print(f"| {entry['hosts']} | {entry['rate_bps'] // MBIT} Mbit/s | {carried} | {failed} |")


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", action="append", choices=list(PARTS))
    parser.add_argument("--tables", action="store_true", help="print the tables of what is there, and measure nothing")
    options = parser.parse_args()
    if not options.tables:
        measure(options.part or list(PARTS), options.rounds)
    tables()
