"""Four elastic workers of DiLoCo with AdamW, which are killed, leave and join at random instants: hangs, goodput, final loss.

From the repository's root: ``python reports/elastic/measure.py 8`` (and ``32``: K) trains 4,480 steps, each of which sleeps 200 ms in the
place of compute, and appends to ``events.csv``, ``rounds.csv`` and ``losses.csv``; 20 minutes, busy or not, because workers sleep. Then
five undisturbed seeds are trained by the loop written out below, which does not sleep. ``--tables`` prints the tables from what is there.
``--quick`` tries the chain in a temporary folder.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench.store import commit

HERE = Path(__file__).parent
WORKERS, STEPS, STEP_S, SEEDS = 4, 4480, 0.2, 5
GAP_S, AWAY_S = 16.0, 5.0
"""Mean seconds between departures, of an exponential distribution; the most that a rank stays away, of a uniform one."""
HANG_S = 60.0
"""Seconds without a step of any worker that count as a hang; fleet.init's time limit."""
CONFIGS = {"outer_lr": 0.7, "outer_momentum": 0.9}
FEATURES, CLASSES, BATCH, LR = 24, 8, 16, 2e-3
EVENTS = ("commit", "k_steps", "t_s", "event", "rank", "life", "alive")
ROUNDS = ("commit", "k_steps", "rank", "life", "step", "t_s", "counted", "workers")
LOSSES = ("commit", "k_steps", "training", "seed", "held_out")


def student(seed: int) -> nn.Module:
    """The network that is trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def batch(number: int, size: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of a noisy teacher, which is always the same; ``number`` draws them."""
    fixed, drawn = torch.Generator().manual_seed(11), torch.Generator().manual_seed(number)
    first, second = torch.randn(FEATURES, 32, generator=fixed), torch.randn(32, CLASSES, generator=fixed)
    inputs = torch.randn(size, FEATURES, generator=drawn)
    scores = torch.tanh(inputs @ first / 3) @ second
    return inputs, torch.multinomial(torch.softmax(scores, dim=1), 1, generator=drawn)[:, 0]


def batch_of(seed: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a rank at a step."""
    return batch(1_000_000 * (seed + 1) + 10 * step + rank)


def held_out(network: nn.Module) -> float:
    """Return the loss on samples that no worker trains with."""
    inputs, labels = batch(7, 20_000)
    with torch.no_grad():
        return float(cross_entropy(network(inputs), labels))


def work(rank: int, life: int, address: str, k_steps: int, steps: int, path: str) -> None:
    """Train as one worker, and write a line for the join and for each round: t, step, steps that counted, workers."""
    torch.set_num_threads(1)
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))  # to leave
    os.environ |= {"TORCHFT_LIGHTHOUSE": address, "RANK": str(rank), "WORLD_SIZE": str(WORKERS), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORKERS), "TORCHELASTIC_RESTART_COUNT": str(life)}
    from fleetbench import DistributedStrategy, fleet

    configs = {"k_steps": k_steps, "elastic": True, **CONFIGS}
    with Path(path).open("w", buffering=1, encoding="utf-8") as out:
        print("ready", time.monotonic(), file=out)
        fleet.init(DistributedStrategy(localsgd=True, localsgd_configs=configs), timeout_s=HANG_S)
        network = fleet.distributed_model(student(100 * rank + life))  # the first worker's become those of all
        optimizer = fleet.distributed_optimizer(torch.optim.AdamW(network.parameters(), lr=LR))
        print("joined", time.monotonic(), file=out)
        for step in range(fleet.num_steps() + 1, steps + 1):
            inputs, labels = batch_of(0, step, rank)
            time.sleep(STEP_S)
            loss = cross_entropy(network(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % k_steps == 0:
                counted = 0 if fleet.job.workers.taken is not None else k_steps  # type: ignore[union-attr]  # an elastic one
                print("round", time.monotonic(), step, counted, fleet.worker_num(), file=out)
            if told:
                return
        print("done", time.monotonic(), held_out(network), file=out)


class Campaign:
    """The processes of one training, and what befalls them."""

    def __init__(self, k_steps: int, steps: int, folder: Path) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(
            ["torch", "torch._dynamo", "real.elastic.collective", "torchft.process_group", "torchft.coordination"]
        )
        self.k_steps, self.steps, self.folder = k_steps, steps, folder
        self.living: dict[int, Any] = {}
        self.lives = [0] * WORKERS
        self.events: list[tuple[float, str, int, int]] = []
        self.chance = random.Random(k_steps)  # noqa: S311  # a seeded draw of events
        self.back = dict[int, float]()
        """When ranks that were struck are started again."""

    def start(self, rank: int, address: str, event: str) -> None:
        """Start a worker."""
        life = self.lives[rank]
        self.lives[rank] += 1
        arguments = (rank, life, address, self.k_steps, self.steps, str(self.folder / f"{rank}-{life}"))
        self.living[rank] = self.context.Process(target=work, args=arguments)
        self.living[rank].start()
        self.note(event, rank, life)

    def note(self, event: str, rank: int, life: int) -> None:
        """Keep an event."""
        self.events.append((time.monotonic(), event, rank, life))
        print(f"K = {self.k_steps}, {len(self.events)}: {event} {rank}, {len(self.living)} live, last step {self.last()[1]}", flush=True)

    def last(self) -> tuple[float, int]:
        """When the last line of any worker was written, and the last step."""
        texts = [path.read_text() for path in self.folder.iterdir()]
        lines = [line.split() for text in texts for line in text[: text.rfind("\n") + 1].splitlines()[-1:]]  # whole ones
        steps = [int(line[2]) for line in lines if line[0] == "round"]
        return max((float(line[1]) for line in lines), default=time.monotonic()), max(steps, default=0)

    def run(self, gap_s: float) -> str:
        """Train to the end; return how it ended: ``ended`` or ``hang``."""
        from real.elastic.gathering import lighthouse

        with lighthouse("127.0.0.1") as address, ExitStack() as stack:
            stack.callback(lambda: [process.kill() for process in self.living.values()])
            for rank in range(WORKERS):
                self.start(rank, address, "start")
            while not any(path.read_text().count("joined") for path in self.folder.iterdir()):
                time.sleep(0.1)
            self.due = time.monotonic() + self.chance.expovariate(1 / gap_s)
            while self.living:
                time.sleep(0.02)
                self.look()
                for rank in [rank for rank, when in self.back.items() if when < time.monotonic() and rank not in self.living]:
                    del self.back[rank]
                    self.start(rank, address, "join")
                if time.monotonic() > self.due and len(self.living.keys() - self.back.keys()) > 1:
                    self.strike()
                    self.due = time.monotonic() + self.chance.expovariate(1 / gap_s)
                if time.monotonic() - self.last()[0] > HANG_S + self.k_steps * STEP_S:
                    self.note("hang", -1, -1)
                    return "hang"
        return "ended"

    def look(self) -> None:
        """See who has ended; after the first good end, no worker is struck or started."""
        for rank, process in list(self.living.items()):
            if process.exitcode is not None:
                del self.living[rank]
                path = self.folder / f"{rank}-{self.lives[rank] - 1}"
                if path.exists() and "done" in path.read_text():
                    self.due, self.back = float("inf"), {}
                elif rank not in self.back:
                    self.note(f"failed with {process.exitcode}", rank, self.lives[rank] - 1)

    def strike(self) -> None:
        """Kill a worker, or tell it to leave."""
        rank, event = self.chance.choice(sorted(self.living.keys() - self.back.keys())), self.chance.choice(["kill", "leave"])
        os.kill(self.living[rank].pid, signal.SIGKILL if event == "kill" else signal.SIGTERM)
        self.back[rank] = time.monotonic() + self.chance.uniform(0, AWAY_S)
        self.note(event, rank, self.lives[rank] - 1)


def undisturbed(seeds: int, k_steps: int, steps: int) -> list[float]:
    """Return each seed's held-out loss of DiLoCo with AdamW and all workers, written out for all networks at once."""
    networks = [student(seed) for seed in range(seeds) for _ in range(WORKERS)]
    every = [torch.stack(own).detach().requires_grad_() for own in zip(*(network.parameters() for network in networks), strict=True)]
    theta = [own.detach()[::WORKERS].clone().requires_grad_() for own in every]
    inner = torch.optim.AdamW(every, lr=LR)
    outer = torch.optim.SGD(theta, CONFIGS["outer_lr"], CONFIGS["outer_momentum"], nesterov=True)
    first, first_bias, second, second_bias = every
    for step in range(1, steps + 1):
        batches = [batch_of(seed, step, rank) for seed in range(seeds) for rank in range(WORKERS)]
        inputs, labels = torch.stack([one for one, _ in batches]), torch.cat([one for _, one in batches])
        hidden = torch.tanh(torch.baddbmm(first_bias[:, None], inputs, first.mT))
        scores = torch.baddbmm(second_bias[:, None], hidden, second.mT)
        inner.zero_grad()
        (cross_entropy(scores.flatten(0, 1), labels, reduction="sum") / BATCH).backward()
        inner.step()
        if step % k_steps == 0:
            with torch.no_grad():
                for own, all_of in zip(theta, every, strict=True):
                    own.grad = own - all_of.unflatten(0, (seeds, WORKERS)).mean(dim=1)
            outer.step()
            with torch.no_grad():
                for own, all_of in zip(theta, every, strict=True):
                    all_of.copy_(own.repeat_interleave(WORKERS, dim=0))
    found = []
    for seed in range(seeds):
        network = student(seed)
        with torch.no_grad():
            for parameter, own in zip(network.parameters(), theta, strict=True):
                parameter.copy_(own[seed])
        found.append(held_out(network))
    return found


def append(path: Path, columns: Iterable[str], rows: Iterable[tuple[Any, ...]]) -> None:
    """Append rows to a CSV file."""
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        if is_new:
            writer.writerow(columns)
        writer.writerows(rows)


def measure(k_steps: int, steps: int, seeds: int, gap_s: float, folder: Path) -> None:
    """Run a campaign and the undisturbed seeds, and append what they found."""
    with tempfile.TemporaryDirectory() as name:
        campaign, own, begin = Campaign(k_steps, steps, Path(name)), commit() or "", time.monotonic()
        print(campaign.run(gap_s))
        alive, rows = 0, []
        for t, event, rank, life in campaign.events:
            alive += {"start": 1, "join": 1, "kill": -1, "leave": -1}.get(event, 0)
            rows.append((own, k_steps, f"{t - begin:.3f}", event, rank, life, alive))
        rounds, losses = [], []
        for path in sorted(Path(name).iterdir()):
            rank, life = path.name.split("-")
            for kind, t, *more in map(str.split, path.read_text().splitlines()):
                at = f"{float(t) - begin:.3f}"
                if kind in ("ready", "joined"):
                    rows.append((own, k_steps, at, kind, rank, life, ""))
                elif kind == "round":
                    rounds.append((own, k_steps, rank, life, more[0], at, *more[1:]))
                else:
                    rows.append((own, k_steps, at, kind, rank, life, ""))
                    losses.append((own, k_steps, "disturbed", f"worker {rank}", more[0]))
    append(folder / "events.csv", EVENTS, rows)
    append(folder / "rounds.csv", ROUNDS, rounds)
    append(folder / "losses.csv", LOSSES, losses)
    torch.set_num_threads(1)
    alone = undisturbed(seeds, k_steps, steps)
    append(folder / "losses.csv", LOSSES, [(own, k_steps, "undisturbed", seed, loss) for seed, loss in enumerate(alone)])


def tables(folder: Path) -> None:
    """Print the result of each K."""
    found = {name: list(csv.DictReader((folder / f"{name}.csv").open(encoding="utf-8"))) for name in ("events", "rounds", "losses")}
    print("| K | kills | leaves | joins | hangs | failed | goodput over the bound (strict) | held-out loss, its workers | five seeds |")
    print("|---|---|---|---|---|---|---|---|---|")
    for k in sorted({int(row["k_steps"]) for row in found["events"]}):
        events, rounds, losses = ([row for row in found[name] if int(row["k_steps"]) == k] for name in ("events", "rounds", "losses"))
        counts = {kind: sum(row["event"].startswith(kind) for row in events) for kind in ("kill", "leave", "join", "hang", "failed")}
        counts["join"] -= sum(row["event"] == "joined" for row in events)
        goodput, strict = share(k, events, rounds)
        disturbed = sorted({f"{float(row['held_out']):.4f}" for row in losses if row["training"] == "disturbed"})
        seeds = [float(row["held_out"]) for row in losses if row["training"] == "undisturbed"]
        print(
            f"| {k} | {' | '.join(map(str, counts.values()))} | {goodput:.3f} ({strict:.3f}) | {', '.join(disturbed)} "
            f"| {min(seeds):.4f} to {max(seeds):.4f} |"
        )


def share(k: int, events: list[dict[str, str]], rounds: list[dict[str, str]]) -> tuple[float, float]:
    """Return the steps that counted over those of the bound, with a newcomer's wait for the round's end and, strictly, without.

    The bound: each life trains whole rounds of undisturbed length (the median) from its join, or from when it was ready, to its end.
    """
    lives = {(row["rank"], row["life"]): dict[str, float]() for row in events if row["event"] in ("start", "join")}
    for row in events:
        if (row["rank"], row["life"]) in lives:
            kind = "end" if row["event"] in ("kill", "leave", "done") or row["event"].startswith("failed") else row["event"]
            lives[row["rank"], row["life"]].setdefault(kind, float(row["t_s"]))
    times = [[float(row["t_s"]) for row in rounds if (row["rank"], row["life"]) == life] for life in lives]
    length_s = statistics.median(later - before for own in times for before, later in itertools.pairwise(own))
    counted = sum(int(row["counted"]) for row in rounds)

    def bound(begin: str) -> float:
        return sum(k * ((own["end"] - own[begin] + 1e-3) // length_s) for own in lives.values() if begin in own and own["end"] > own[begin])

    return counted / bound("joined"), counted / bound("ready")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("k_steps", type=int, nargs="?")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    if asked.quick:
        with tempfile.TemporaryDirectory() as name:
            measure(asked.k_steps or 8, 160, 2, 6.0, Path(name))
            tables(Path(name))
    elif not asked.tables:
        measure(asked.k_steps, STEPS, SEEDS, GAP_S, HERE)
        tables(HERE)
    else:
        tables(HERE)
