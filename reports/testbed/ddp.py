"""DDP on the testbed beside fleetbench's synchronous strategy, at every fusion size, and beside what no synchronous training beats.

Run from the repository's root: ``python reports/testbed/ddp.py [--rates 200 100] [--rounds N]``. 4 hosts; 20 equal layers with 2.5 MB
of gradients, 50 ms of forward and 100 ms of backward, emulated: DDP and the engine train the same ``EmulatedModel``, so that nothing
differs but who exchanges the gradients. One launch of ranks a rate; all arms stay open and take turns. The arms of one size are
visited one behind the other, in the next round in the mirror image of that order. Results go to ``ddp_raw.jsonl`` as they come, void
ones included; ``--tables`` prints the tables of README.md from that file. ``--quick`` checks in a minute that everything runs.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from ranks import Processes

from fleetbench.cluster import Cluster, Link
from fleetbench.config import decode
from fleetbench.plan.layers import declared_table
from fleetbench.quantities import BitsPerSecond
from fleetbench.store import machine, versions
from fleetbench.workload import Workload
from real.emulated.pace import lateness_of
from real.testbed.network import is_rootless
from real.testbed.noise import quietly
from real.testbed.testbed import Testbed
from real.testbed.topology import wire_s
from tuner.sequential import Speedup, paired_speedup

RAW = Path(__file__).parent / "ddp_raw.jsonl"
PROGRAM = (str(Path(__file__).parent / "ddp_rank.py"),)
HOSTS = 4
MBIT = 10**6
LAYERS = {"name": "block", "params": 31_250, "forward": "2.5 ms", "backward": "5 ms", "repeat": 20}
WORKLOAD = {"model": "layers", "layers": [LAYERS]}
OPENING_STEPS = 4
"""Steps behind which both have settled on their buckets, and DDP has told its own."""
WARMUP_STEPS = 2
STEPS = 6
QUICK_STEPS = 2
Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """One size of buckets, as DDP and as Fleet's fields say it."""

    ddp: Mapping[str, Any]
    ours: Mapping[str, Any]

    def arms(self) -> dict[str, tuple[str, Mapping[str, Any]]]:
        """Kind and options, by name."""
        views = {**self.ddp, "gradient_as_bucket_view": True}
        two = {**self.ours, "sync_nccl_allreduce": False}
        return {"ddp": ("ddp", self.ddp), "ddp_views": ("ddp", views), "ours": ("ours", self.ours), "ours_two": ("ours", two)}


# At its default DDP's first bucket closes at 1 MiB, the others at 25 MiB: 9 layers and the other 11. Fleet's soft caps have one size,
# so its other pass makes these two.
SIZES = {
    "default": Size({}, {"fusion": "by_number", "fuse_grad_size_in_num": 9, "last_comm_group_size_MB": 1.35}),
    **{f"{cap:g}": Size({"bucket_cap_mb": cap}, {"fuse_grad_size_in_MB": cap}) for cap in (25.0, 0.5, 0.25, 0.12, 0.1)},
}
RIVALS = ("ddp", "ddp_views")


class Cast:
    """The ranks of one launch, with every arm open. A context manager: behind it they are gone."""

    def __init__(self, testbed: Testbed, folder: Path, sizes: Sequence[str]) -> None:
        self._processes = Processes(testbed, folder, testbed.topology.hosts, PROGRAM)
        self.buckets: dict[str, list[int]] = {}
        """Bytes of every arm's buckets."""
        store = folder / f"gloo-{secrets.token_hex(8)}"
        try:
            for rank in range(HOSTS):
                self._processes.tell(rank, {"store": str(store), "rank": rank, "size": HOSTS, "workload": WORKLOAD})
            self._processes.answers()
            for size in sizes:
                for arm, (kind, options) in SIZES[size].arms().items():
                    request = {"do": "add", "arm": _key(arm, size), "kind": kind, "options": options, "warmup": OPENING_STEPS}
                    self.buckets[_key(arm, size)] = self._ask(request)[0]["buckets"]
        except BaseException:
            self._processes.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.end()

    def visit(self, arms: Sequence[str], steps: int) -> dict[str, Entry]:
        """Time arms, one behind the other: every rank's steps, and whether all averages were right."""
        found = {}
        for arm in arms:
            answers = self._ask({"do": "visit", "arm": arm, "warmup": WARMUP_STEPS, "steps": steps})
            found[arm] = {"step_us": [answer["step_us"] for answer in answers], "right": all(answer["right"] for answer in answers)}
        return found

    def lateness(self) -> dict[str, dict[str, float]]:
        """Of emulated compute, in seconds, by arm."""
        answers = self._ask({"do": "lateness"})
        return {arm: lateness_of([answer[arm] for answer in answers]) for arm in answers[0]}

    def _ask(self, request: Entry) -> list[dict[str, Any]]:
        for rank in range(HOSTS):
            self._processes.tell(rank, request)
        return self._processes.answers()


def _key(arm: str, size: str) -> str:
    return f"{arm} {size}"


def measure(rates: Sequence[int], rounds: int, sizes: Sequence[str], steps: int) -> Iterator[Entry]:
    """Every size in every round; where blocks were void, up to twice as many rounds."""
    for rate in rates:
        cluster = Cluster(nodes=HOSTS, inter=Link(bandwidth=BitsPerSecond(rate * MBIT)))
        with tempfile.TemporaryDirectory(prefix="fleetbench-") as name, Testbed(cluster) as testbed:
            links = [asdict(link) for link in testbed.verify()]
            with Cast(testbed, Path(name), sizes) as cast:
                yield {"kind": "ground", "rate_mbit": rate, "rootless": is_rootless(), "links": links, "buckets": cast.buckets}
                counted = dict.fromkeys(sizes, 0)
                for number in range(2 * rounds):
                    for size in (size for size in sizes if counted[size] < rounds):
                        arms = [_key(arm, size) for arm in SIZES[size].arms()]
                        order = arms if number % 2 == 0 else arms[::-1]
                        trial = quietly(testbed, lambda order=order: cast.visit(order, steps), tries=1)
                        counted[size] += trial.counts
                        entry = {"kind": "round", "rate_mbit": rate, "round": number, "size": size, "counts": trial.counts}
                        yield {**entry, "arms": trial.value, "block": asdict(trial.blocks[-1])}
                yield {"kind": "lateness", "rate_mbit": rate, "lateness_s": cast.lateness()}


def step_s(visit: Entry) -> float:
    """Seconds a step: the mean over ranks and steps."""
    return statistics.mean(statistics.mean(rank) for rank in visit["step_us"]) * 1e-6


def bound_s(rate_mbit: int) -> float:
    """What no synchronous training beats: compute alone, or the wire between the last layer's backward and the first one's forward."""
    table = declared_table(decode(WORKLOAD, Workload, "workload"))
    first = table.layers[0]
    nbytes = sum(gradient.nbytes for gradient in table.by_readiness())
    return max(
        (table.forward_ns + table.backward_ns) * 1e-9, wire_s(nbytes, HOSTS, rate_mbit * MBIT) + (first.backward + first.forward) * 1e-9
    )


def floor_s(buckets: Sequence[int], rate_mbit: int) -> float:
    """What these buckets take, one behind the other, over links without any latency, where the forward waits for all of them."""
    table = declared_table(decode(WORKLOAD, Workload, "workload"))
    gradients = table.by_readiness()
    ready_s = {nbytes: gradient.ready * 1e-9 for nbytes, gradient in zip(accumulate(g.nbytes for g in gradients), gradients, strict=True)}
    end_s = 0.0
    for nbytes, upto in zip(buckets, accumulate(buckets), strict=True):
        end_s = max(end_s, table.forward_ns * 1e-9 + ready_s[upto]) + wire_s(nbytes, HOSTS, rate_mbit * MBIT)
    return max(end_s, (table.forward_ns + table.backward_ns) * 1e-9)


def tables(entries: Sequence[Entry]) -> None:
    """The tables of README.md."""
    for rate in sorted({entry["rate_mbit"] for entry in entries}, reverse=True):
        found = [entry for entry in entries if entry["rate_mbit"] == rate]
        _rate_table(rate, found)


def _rate_table(rate: int, entries: Sequence[Entry]) -> None:
    rounds = [entry for entry in entries if entry["kind"] == "round"]
    buckets = {arm: sizes for entry in entries if entry["kind"] == "ground" for arm, sizes in entry["buckets"].items()}
    bound = bound_s(rate)
    print(f"\n{HOSTS} hosts, {rate} Mbit/s, emulated compute; the bound is {1e3 * bound:.1f} ms; ms: median over rounds [range]\n")
    print(
        "| bucket, MiB | buckets | n | void | their floor, ms | DDP, ms | DDP with views, ms | ours, ms | ours, two in flight, ms "
        "| ours / bound | DDP / ours | DDP with views / ours | verdict | DDP / ours in two | DDP with views / ours in two | verdict |\n"
        f"|{'---|' * 16}"
    )
    best: dict[str, float] = {}
    for size, spec in SIZES.items():
        own = [entry for entry in rounds if entry["size"] == size]
        good = [entry for entry in own if entry["counts"]]
        if not good:
            continue
        times = {arm: [step_s(entry["arms"][_key(arm, size)]) for entry in good] for arm in spec.arms()}
        for arm, seconds in times.items():
            best[arm] = min(best.get(arm, float("inf")), statistics.median(seconds))
        ratios, two = ([paired_speedup(times[rival], times[arm]) for rival in RIVALS if len(good) > 1] for arm in ("ours", "ours_two"))
        sizes = {tuple(buckets[_key(arm, size)]) for arm in times}
        floor = f"{1e3 * floor_s(sizes.copy().pop(), rate):.1f}" if len(sizes) == 1 else "BUCKETS DIFFER"
        print(
            f"| {size} | {len(buckets[_key('ours', size)])} | {len(good)} | {len(own) - len(good)} | {floor} "
            f"| {' | '.join(_spread(times[arm]) for arm in (*RIVALS, 'ours', 'ours_two'))} "
            f"| {statistics.median(times['ours']) / bound:.2f} "
            f"| {' | '.join(map(_ratio, ratios)) if ratios else 'one round |'} | {_verdict(ratios)} "
            f"| {' | '.join(map(_ratio, two)) if two else 'one round |'} | {_verdict(two)} |"
        )
    wrong = sum(not visit["right"] for entry in rounds for visit in entry["arms"].values())
    print(f"\nvisits with a wrong average: {wrong} of {sum(len(entry['arms']) for entry in rounds)}")
    if best:
        print(f"best of all sizes, over the bound: {', '.join(f'{arm} {seconds / bound:.2f}' for arm, seconds in best.items())}")
    for entry in entries:
        if entry["kind"] == "lateness":
            late = [arm for arm in entry["lateness_s"].values() if arm]
            worst = {name: max(arm[name] for arm in late) for name in ("layer_p50", "layer_p95", "layer_max")}
            print(f"lateness of a layer, worst arm: {', '.join(f'{name[6:]} {1e3 * value:.2f} ms' for name, value in worst.items())}")


def _spread(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.1f} [{1e3 * min(seconds):.1f}, {1e3 * max(seconds):.1f}]"


def _ratio(ratio: Speedup) -> str:
    return f"{ratio.mean:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _verdict(ratios: Sequence[Speedup]) -> str:
    """Of one-sided 95 % bounds, both rivals together."""
    if any(ratio.high < 1.0 for ratio in ratios):
        return "SLOWER"
    if not ratios:
        return ""
    return "faster" if all(ratio.low >= 1.0 for ratio in ratios) else "not slower"


def main() -> None:
    """Measure, and print the tables of what was measured now."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="+", type=int, default=[200], help="of the links, in Mbit/s")
    parser.add_argument("--rounds", type=int, default=6, help="counted rounds, an even number so that orders balance")
    parser.add_argument("--quick", action="store_true", help="two rounds of few steps at two sizes, into a temporary file")
    parser.add_argument("--tables", action="store_true", help="print the tables of what is there, and measure nothing")
    options = parser.parse_args()
    raw = Path(tempfile.gettempdir()) / "fleetbench_ddp_quick.jsonl" if options.quick else RAW
    if not options.tables:
        raw.unlink(missing_ok=True)
        taken = {"started": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": machine(), "versions": versions()}
        rounds, sizes, steps = (2, ["default", "0.1"], QUICK_STEPS) if options.quick else (options.rounds, list(SIZES), STEPS)
        for entry in measure(options.rates, rounds, sizes, steps):
            with raw.open("a", encoding="utf-8") as out:
                out.write(json.dumps({**entry, **(taken if entry["kind"] == "ground" else {})}) + "\n")
            if entry["kind"] == "round":
                times = {arm: f"{1e3 * step_s(visit):.1f} ms" for arm, visit in entry["arms"].items()}
                print(f"# {entry['rate_mbit']} Mbit/s, round {entry['round']}: {times}{'' if entry['counts'] else ', void'}", flush=True)
    tables([json.loads(line) for line in raw.read_text(encoding="utf-8").splitlines()])


if __name__ == "__main__":
    main()
