"""Planted faults: what fleetbench why says of trainings with a known fault, beside what the fault costs without it.

python reports/why/planted.py [--runs 3] [FAULT ...]

Each training runs as it is with the fault, without it, without it and with it (mean step by its own clock; once each over links), and then
under fleetbench why. Two ranks of gloo on one host; those of the network in two namespaces of it with two shaped links, which needs root.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
SMALL, MANY = "--batch 64", "--width 16 --depth 400 --batch 4"
OVER_LINKS = "--width 512 --batch 512"
FAULTS = {
    # the fault's arguments with {size}, its size's range, the training's own, the first cause, and a part of the remedy
    "slow_rank": ("--fault slow_rank --size {size}", (8, 16), SMALL, "a slow rank", ""),
    "loader_one": ("--fault loader_one --size {size}", (8, 16), SMALL, "a slow rank", "num_workers"),
    "loader_all": ("--fault loader_all --size {size}", (8, 16), SMALL, "the loader", "num_workers"),
    "uneven": ("--fault uneven --size {size}", (1.6, 2.4), "--width 512", "uneven batches", ""),
    "unused": ("--fault unused", (0, 0), MANY, "the search for unused parameters", "find_unused_parameters=False"),
    "buffers": ("--fault buffers --size {size}", (30, 60), SMALL, "buffers", "broadcast_buffers=False"),
    "checkpoint": ("--fault checkpoint --size {size}", (80, 200), SMALL, "periodic work", ""),
    "threads": ("--threads 8", (0, 0), "--width 512", "threads", "torch.set_num_threads(1)"),
    "buckets": ("--bucket-mb 100", (0, 0), "--width 512 --batch 1536", "the buckets", "bucket_cap_mb"),
    "slow_link": ("", (0, 0), OVER_LINKS, "the network", ""),
    "wrong_interface": ("", (0, 0), OVER_LINKS, "the network", "GLOO_SOCKET_IFNAME=fast"),
    "none": ("", (0, 0), "--width 512 --batch 256", "", ""),
}
COLUMNS = (
    "fault",
    "size",
    "run",
    "commit",
    "without_ms",
    "with_ms",
    "planted_share",
    "first_cause",
    "its_share",
    "found_share",
    "remedy",
    "is_right",
)
LINKS = {"buckets": ("fast", "fast"), "slow_link": ("slow", "fast"), "wrong_interface": ("slow", "fast")}
"""Links with the fault, and without it."""
RATES = {"fast": "200mbit", "slow": "50mbit"}


def main() -> None:
    """Run the faults named, or all, and write what they gave below what is there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("faults", nargs="*")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=40)
    options = parser.parse_args()
    commit = subprocess.run(
        ["/usr/bin/env", "git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    path = HERE / "planted.csv"
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        if is_new:
            table.writerow(COLUMNS)
        for run in range(options.runs):
            for name in options.faults or FAULTS:
                table.writerow(one(name, run, options.seed, options.seconds, commit))
                file.flush()


def one(name: str, run: int, seed: int, seconds: int, commit: str) -> list[object]:
    """A fault's row: what it costs, and what is said of it."""
    more, (low, high), own, cause, remedy = FAULTS[name]
    size = round(random.Random(f"{seed}/{name}/{run}").uniform(low, high), 1)  # noqa: S311  # a size
    arguments = f"{own} {more}".format(size=size)
    links = LINKS.get(name)
    wrong_link, right_link = links or (None, None)
    try:
        if links is not None:
            open_links(both=name == "wrong_interface", rate=RATES[wrong_link])
        with_ms = [step_ms(arguments, wrong_link)]
        if name == "slow_link":
            open_links(both=False, rate=RATES[right_link])
        right = wrong_link if name == "slow_link" else right_link
        best = " --bucket-mb 0.5" if name == "buckets" else ""
        without_ms = [step_ms(own + best, right) for _ in range(1 if links else 2)] if name != "none" else with_ms
        if links is None and name != "none":  # in the order A B B A
            with_ms.append(step_ms(arguments, wrong_link))
        if name == "slow_link":
            open_links(both=False, rate=RATES[wrong_link])
        told = why(arguments, wrong_link, seconds)
    finally:
        if links is not None:
            close_links()
    causes = [one for one in told["causes"] if one["remedy"]] if name == "none" else told["causes"]
    first = causes[0] if causes else {"name": "", "remedy": "", "tried": None, "simulated_s": None, "seconds": 0.0}
    tried = first["tried"]
    found = 1 - first["simulated_s"] / told["step_s"] if first["simulated_s"] else first["seconds"] / told["step_s"]
    found = 1 - tried["other_s"] / tried["today_s"] if tried else found
    share = round(first["seconds"] / told["step_s"], 3)
    is_right = first["name"] == cause and remedy in first["remedy"] and not (name == "none" and first["remedy"])
    costs, without = statistics.fmean(with_ms), statistics.fmean(without_ms)
    row = [name, size, run, commit, round(without, 2), round(costs, 2), round(1 - without / costs, 3)]
    print(*row, first["name"], share, round(found, 3), first["remedy"], is_right, flush=True)
    return [*row, first["name"], share, round(found, 3), first["remedy"], is_right]


def command(arguments: str, link: str | None) -> list[str]:
    """Two ranks on this host, or one in each namespace over a link."""
    script = f"{HERE / 'train.py'} {arguments}"
    if link is None:
        return [str(BIN / "torchrun"), "--nproc-per-node", "2", *script.split()]
    nodes = [
        f"ip netns exec why{node} env GLOO_SOCKET_IFNAME={link} {BIN}/torchrun --nnodes 2 --node-rank {node} --nproc-per-node 1 "
        f"--master-addr 10.77.0.1 --master-port 29511 {script}"
        for node in (0, 1)
    ]
    return ["bash", "-c", f"{nodes[1]} & other=$!; {nodes[0]}; code=$?; wait $other; exit $code"]


def step_ms(arguments: str, link: str | None) -> float:
    """The mean step of a training of its own."""
    steps = 25 if link else 150
    ended = subprocess.run(command(f"{arguments} --steps {steps}", link), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"step_ms ([\d.]+)", ended.stdout)
    assert found is not None, ended.stdout
    return float(found[1])


def why(arguments: str, link: str | None, seconds: int) -> dict:
    """What fleetbench why says."""
    words = [sys.executable, "-m", "fleetbench", "why", "--json", "--seconds", str(seconds), "--out", "/tmp/why-runs"]  # noqa: S108
    ended = subprocess.run([*words, "--", *command(arguments, link)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def open_links(*, both: bool, rate: str) -> None:
    """Two namespaces; a link of ``rate`` that is called ``slow`` or ``fast``, and another, fast one if ``both``."""
    close_links()
    names = {"slow": rate} | ({"fast": RATES["fast"]} if both else {})
    if rate == RATES["fast"]:
        names = {"fast": rate, "slow": rate}
    for node in (0, 1):
        sh(f"ip netns add why{node}")
        sh(f"ip -n why{node} link set lo up")
    for number, (name, own) in enumerate(names.items()):
        sh(f"ip link add {name} netns why0 type veth peer name {name} netns why1")
        for node in (0, 1):
            sh(f"ip -n why{node} addr add 10.77.{number}.{node + 1}/24 dev {name}")
            sh(f"ip -n why{node} link set {name} up gso_max_size 8192 gro_max_size 8192")
            sh(f"ip netns exec why{node} tc qdisc add dev {name} root tbf rate {own} burst 64kb limit 4mb")


def close_links() -> None:
    """Remove the namespaces, and their links with them."""
    for node in (0, 1):
        subprocess.run(f"ip netns del why{node}".split(), capture_output=True, check=False)


def sh(line: str) -> None:
    """Run a command, which must succeed."""
    subprocess.run(line.split(), check=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
