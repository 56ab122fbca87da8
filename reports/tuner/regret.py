"""How far is the tuner's choice from the best strategy of its whole space, by simulation alone?

    python reports/tuner/regret.py             # six fixed files, and six drawn by a seed that is drawn itself; writes regret.json
    python reports/tuner/regret.py --seed N    # the six of that seed again
    python reports/tuner/regret.py --few N     # of the files of that seed: what 150 simulations find; writes regret_few.json
    python reports/tuner/regret.py --large     # three files, drawn, of too many plans to simulate all; writes regret_large.json
    python reports/tuner/regret.py --on ray    # before any of these: the enumerations on Ray; CPU seconds are this machine's
    python reports/tuner/regret.py --print     # the tables of README.md, from regret.json

Of each file the whole space that the tuner searches is simulated, every different plan once, as the tuner's trials are. The best of them,
and what every method chose, are simulated again on ten fresh seeds. Regret is a choice's mean time over the least mean time, less 1.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from scipy.stats import norm, qmc

from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.plan.fusion import Cost, fuse
from fleetbench.profile import table_for
from fleetbench.store import commit, machine
from fleetbench.strategy import DistributedStrategy
from sim.many.pool import Where, run_all
from sim.scenario import setting_of
from tuner.search import StepS
from tuner.simulated.answer import tune_simulated
from tuner.simulated.candidates import FINAL_STEPS, FINALISTS, SEEDS, ranked, shortened, step_time
from tuner.space import Equivalence, Space, parameters_of, search_space
from tuner.tune import advice_for

HERE = Path(__file__).parent
ALL, SOME, LARGE = "regret.json", "regret_few.json", "regret_large.json"
FRESH = range(1000, 1010)
MOST_AGAIN = 15
"""Of the best by the enumeration, so many are simulated on the fresh seeds."""
LEAST_COMBINATIONS = 10_000
GRID = {"nccl_comm_num": [1, 2, 3, 4], "min_gain": 0.0}
"""Without a least gain, so that what is looked at is the search."""
JITTER = {"kind": "jitter", "distribution": "lognormal", "mean": 0.05}
Times = dict[DistributedStrategy, float]
At = Callable[[np.ndarray], DistributedStrategy]
Kind = Callable[[int], Iterator[tuple[str, Experiment]]]


def experiment_of(name: str, layers: list[dict[str, Any]], cluster: dict[str, Any], *, cuda: bool, wire: tuple[str, ...]) -> Experiment:
    """With as many sizes of fusion, from all gradients' bytes to a 400th, as give ``LEAST_COMBINATIONS`` combinations."""
    intra = {"bandwidth": "200 GB/s", "latency": "3 us"} if cuda else {"bandwidth": "40 Gbit/s", "latency": "20 us"}
    data: dict[str, Any] = {
        "name": name,
        "workload": {"model": "layers", "layers": layers, "steps": FINAL_STEPS},
        "cluster": {"intra": intra, **cluster},
        "run": {"device": "cuda", "backend": "nccl"} if cuda else {},
        "tune": GRID | ({"allow": ["wire16"], "wire": list(wire)} if len(wire) > 1 else {}),
    }
    size_mb = 4 * sum(layer["params"] * layer.get("repeat", 1) for layer in layers) / 2**20
    for number in itertools.count(20, 20):
        sizes = dict.fromkeys(float(f"{size:.5g}") for size in np.geomspace(size_mb / 400, size_mb, number))
        experiment = Experiment.from_dict(data | {"tune": data["tune"] | {"fuse_grad_size_in_MB": list(sizes)}})
        space = search_space(experiment)
        values = dict(space.choices)
        free = len(values["nccl_comm_num"]) + 1 if "sync_nccl_allreduce" in values else len(values["nccl_comm_num"])
        others = [len(values[name]) for name in values if name not in ("nccl_comm_num", "sync_nccl_allreduce")]
        if math.prod(others) * free >= LEAST_COMBINATIONS:  # several communicators run free whatever it says of one
            return experiment
    raise AssertionError


def uneven(dice: random.Random, count: int, mean: float) -> list[dict[str, Any]]:
    """Layers of lognormal sizes, about ``mean`` parameters, and times."""
    found = []
    for place in range(count):
        forward_us = round(dice.lognormvariate(6.0, 0.5))
        params = round(mean * dice.lognormvariate(0, 1.2))
        found.append({"name": f"layer{place}", "params": params, "forward": f"{forward_us} us", "backward": f"{2 * forward_us} us"})
    return found


def even(count: int, params: int, forward_us: int) -> list[dict[str, Any]]:
    """Equal layers."""
    return [{"name": "block", "params": params, "forward": f"{forward_us} us", "backward": f"{2 * forward_us} us", "repeat": count}]


def embedding(params: int, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A large first layer, whose gradient is ready last."""
    return [{"name": "embedding", "params": params, "forward": "200 us", "backward": "400 us"}, *blocks]


def links(gbit: float, latency_us: float) -> dict[str, str]:
    """Of a node."""
    return {"bandwidth": f"{gbit:.4g} Gbit/s", "latency": f"{latency_us:.3g} us"}


def fixed(_: int) -> Iterator[tuple[str, Experiment]]:
    """The six files that are written down; the tuner was mended when their like had been seen."""
    dice = random.Random(1)  # noqa: S311  # drawn again by who checks it
    fast = {"nodes": 8, "trainers_per_node": 8, "nics_per_node": 8, "inter": links(400, 5), "collective": "nccl-hopper"}
    yield "8 x 8, 8 x 400 Gbit/s", experiment_of("fast", even(12, 20_000_000, 400), fast, cuda=True, wire=("fp32",))
    slow = {"nodes": 8, "trainers_per_node": 8, "inter": links(10, 30), "stragglers": [JITTER]}
    yield "8 x 8, 10 Gbit/s, jitter", experiment_of("slow", uneven(dice, 9, 4e6), slow, cuda=True, wire=("fp32", "bf16"))
    racks = {"nodes": 16, "trainers_per_node": 4, "inter": links(25, 20), "racks": {"nodes": 4, "oversubscription": 4.0}}
    yield "16 x 4, racks", experiment_of("racks", uneven(dice, 9, 4e6), racks, cuda=True, wire=("fp32",))
    late = [JITTER | {"distribution": "exponential", "mean": 0.2}, {"kind": "slow_node", "nodes": [3], "factor": 1.3}]
    single = {"nodes": 16, "inter": links(25, 40), "stragglers": late}
    yield (
        "16 x 1, embedding, stragglers",
        experiment_of("embedding", embedding(60_000_000, even(10, 3_000_000, 1500)), single, cuda=False, wire=("fp32", "bf16")),
    )
    few = {"trainers_per_node": 2, "cores_per_node": 2, "intra": links(5, 400), "host_bandwidth": "2 GB/s", "collective": "gloo"}
    yield "1 x 2, 2 cores", experiment_of("few", uneven(dice, 14, 3e5), few, cuda=False, wire=("fp32", "bf16"))
    served = {"nodes": 4, "servers": 2, "inter": links(10, 40), "stragglers": [JITTER]}
    data = {"name": "served", "workload": {"model": "layers", "layers": even(8, 1_000_000, 1500), "steps": FINAL_STEPS}, "cluster": served}
    data |= {"strategy": {"mode": "ps"}, "tune": {"local_steps": [1, 2, 4, 8], "min_gain": 0.0}}
    yield "4 x 1, 2 parameter servers", Experiment.from_dict(data)


def drawn(seed: int) -> Iterator[tuple[str, Experiment]]:
    """Six files; a 16-bit wire is allowed in every second."""
    dice = random.Random(seed)  # noqa: S311  # as above
    for number in range(6):
        nodes, each = dice.choice([(8, 4), (4, 8), (8, 2), (4, 4), (2, 8), (16, 1), (8, 1)])
        cuda, gbit, latency_us = dice.random() < 0.5, 10 ** dice.uniform(0, 2.6), 10 ** dice.uniform(0.7, 2)
        count, mean = dice.randint(5, 10), 10 ** dice.uniform(5, 7)
        blocks = dice.choice([even(count, round(mean), dice.randint(200, 3000)), uneven(dice, count, mean)])
        layers = embedding(round(mean * dice.uniform(5, 50)), blocks) if dice.random() < 0.3 else blocks
        cluster: dict[str, Any] = {"nodes": nodes, "trainers_per_node": each, "inter": links(gbit, latency_us)}
        jitter = JITTER | {"distribution": dice.choice(["lognormal", "exponential"]), "mean": dice.choice([0.03, 0.1, 0.3])}
        slow_node = {"kind": "slow_node", "nodes": [dice.randrange(nodes)], "factor": dice.choice([1.1, 1.5])}
        cluster["stragglers"] = dice.choice([[], [jitter], [jitter, slow_node]])
        if nodes >= 8 and dice.random() < 0.3:
            cluster["racks"] = {"nodes": 4, "oversubscription": dice.choice([2.0, 4.0])}
        name = f"{nodes} x {each}, {gbit:.3g} Gbit/s, {len(layers) if layers != blocks or len(blocks) > 1 else count} layers"
        name += ", stragglers" * bool(cluster["stragglers"]) + ", racks" * ("racks" in cluster)
        yield name, experiment_of(f"drawn-{number}", layers, cluster, cuda=cuda, wire=("fp32", "bf16") if number % 2 else ("fp32",))


def large(seed: int) -> Iterator[tuple[str, Experiment]]:
    """Three files of so many unlike layers that the tuner does not simulate every plan."""
    dice = random.Random(seed)  # noqa: S311  # as above
    for number in range(3):
        (nodes, each), cuda = dice.choice([(8, 2), (4, 4), (2, 8)]), dice.random() < 0.5
        count, gbit = dice.randint(24, 40), 10 ** dice.uniform(0.5, 2)
        cluster = {"nodes": nodes, "trainers_per_node": each, "inter": links(gbit, 10 ** dice.uniform(0.7, 2)), "stragglers": [JITTER]}
        layers = uneven(dice, count, 10 ** dice.uniform(5.3, 6.3))
        name = f"{nodes} x {each}, {gbit:.3g} Gbit/s, {count} layers, stragglers"
        yield name, experiment_of(f"large-{number}", layers, cluster, cuda=cuda, wire=("fp32", "bf16"))


def cpu_s() -> float:
    """CPU seconds of this process, and of those that it started and that have ended: a search uses all cores."""
    return sum(os.times()[:4])


def enumerated(experiment: Experiment, on: Where = "local") -> tuple[int, Times]:
    """How many combinations there are, and the time of each different plan; not by the tuner's own enumeration."""
    if experiment.strategy.mode == "ps":
        with tempfile.TemporaryDirectory() as out:
            found = ranked(experiment, out=Path(out)).step_s
        return len(found), found
    space, table, same = search_space(experiment), table_for(experiment), Equivalence(experiment)
    gradients, costs = table.by_readiness(), dict[str, Cost | None]()
    unlike: dict[tuple[object, ...], DistributedStrategy] = {}
    num_combinations = 0
    for point in space.points():
        num_combinations += 1
        strategy = space.strategy(point)
        others = [(name, value) for name, value in parameters_of(strategy).items() if name != "fusion"]
        if strategy.fusion not in costs:
            costs[strategy.fusion] = setting_of(experiment.replace(strategy=strategy), table).cost
        buckets = fuse(gradients, strategy, costs[strategy.fusion])
        unlike.setdefault((*others, *(bucket.gradients for bucket in buckets)), strategy)
    own, step_s = experiment.strategy, step_time(shortened(experiment))
    different = {same.key(own): own} | {same.key(strategy): strategy for strategy in unlike.values()}
    return num_combinations, dict(zip(different.values(), run_all(step_s, [*different.values()], on=on), strict=True))


def on_seeds(experiment: Experiment, strategies: Iterable[DistributedStrategy], seeds: Iterable[int]) -> Times:
    """Mean seconds of a step, of ``FINAL_STEPS`` steps a seed; one seed where nothing is drawn."""
    own = list(dict.fromkeys(strategies))
    length = shortened(experiment, FINAL_STEPS)
    chosen = list(seeds) if experiment.cluster.stragglers else list(seeds)[:1]
    measures = [step_time(length.replace(run=dataclasses.replace(length.run, seed=seed))) for seed in chosen]
    return {strategy: statistics.fmean(step_s(strategy) for step_s in measures) for strategy in own}


class Counted:
    """Seconds of a step by strategy, each strategy simulated once, and the CPU seconds since the beginning."""

    def __init__(self, step_s: StepS) -> None:
        self.step_s, self.began, self.times = step_s, time.process_time(), Times()

    def __call__(self, strategy: DistributedStrategy) -> float:
        """Seconds of a step."""
        if strategy not in self.times:
            self.times[strategy] = self.step_s(strategy)
        return self.times[strategy]

    @classmethod
    def of(cls, times: Times) -> Counted:
        """Of a search that is over."""
        counted = cls(lambda _: math.nan)
        counted.times = times
        return counted

    @property
    def spent_s(self) -> float:
        """CPU seconds."""
        return time.process_time() - self.began

    def best(self, experiment: Experiment) -> DistributedStrategy:
        """The best few are simulated again on other seeds, as the tuner does it."""
        few = sorted(self.times, key=lambda strategy: self.times[strategy])[:FINALISTS]
        again = on_seeds(experiment, few, range(1, 1 + SEEDS))
        return min(again, key=lambda strategy: again[strategy])


def at_random(experiment: Experiment, space: Space, limit_s: float, most: float = math.inf) -> Counted:
    """Combinations drawn evenly, for so many CPU seconds, or so many simulations."""
    step_s, dice = Counted(step_time(shortened(experiment))), random.Random(0)  # noqa: S311  # a rival's
    while step_s.spent_s < limit_s and len(step_s.times) < most:
        try:
            step_s(space.strategy({name: dice.choice(values) for name, values in space.choices}))
        except ConfigError:  # values that exclude each other
            continue
    return step_s


def by_tpe(experiment: Experiment, space: Space, limit_s: float) -> Counted:
    """Optuna's TPE with its defaults, in memory, for so many CPU seconds."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study, step_s = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0)), Counted(step_time(shortened(experiment)))

    def objective(trial: optuna.Trial) -> float:
        point: dict[str, Any] = {name: trial.suggest_categorical(name, values) for name, values in space.choices}
        try:
            return step_s(space.strategy(point))
        except ConfigError:
            raise optuna.TrialPruned from None

    while step_s.spent_s < limit_s:
        study.optimize(objective, n_trials=1)
    return step_s


def improvement(known: np.ndarray, scores: np.ndarray, asked: np.ndarray, noise: float) -> np.ndarray:
    """Expected improvement of a Gaussian process with a squared-exponential kernel of width 0.2 in the unit cube; scores standardised."""

    def kernel(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return np.asarray(np.exp(-((one[:, None] - other[None]) ** 2).sum(2) / (2 * 0.2**2)))

    scaled = (scores - scores.mean()) / (scores.std() or 1.0)
    covariance, cross = kernel(known, known) + noise**2 * np.eye(len(known)), kernel(asked, known)
    mean = cross @ np.linalg.solve(covariance, scaled)
    deviation = np.sqrt(np.maximum(1 - (cross * np.linalg.solve(covariance, cross.T).T).sum(1), 1e-12))
    gain = mean - (kernel(known, known) @ np.linalg.solve(covariance, scaled)).max()
    return np.asarray(gain * norm.cdf(gain / deviation) + deviation * norm.pdf(gain / deviation))


def bayesian(
    step_s: Counted, strategy_at: Callable[[np.ndarray], DistributedStrategy], first: np.ndarray, asked: np.ndarray, count: int
) -> None:
    """``count`` simulations: those of ``first``, then where the improvement that is expected is largest."""
    known = [*first]
    scores = [1 / step_s(strategy_at(point)) for point in first]
    while len(known) < count:
        known.append(asked[int(np.argmax(improvement(np.array(known), np.array(scores), asked, noise=0.2)))])
        scores.append(1 / step_s(strategy_at(known[-1])))


def as_horovod(experiment: Experiment, base: DistributedStrategy, inner: tuple[str, ...]) -> Counted:
    """As Horovod's ``parameter_manager`` tunes: 21 samples of the fusion threshold, 0 to 64 MB, four of them given, for each hierarchy.

    Its cycle time has no counterpart here. Its process is over the threshold itself, not its logarithm.
    """
    step_s = Counted(step_time(shortened(experiment)))
    for hierarchy in inner:
        own = with_hierarchy(base, hierarchy)

        def strategy_at(point: np.ndarray, own: DistributedStrategy = own) -> DistributedStrategy:
            return own.replace(fuse_grad_size_in_MB=max(0.001, float(64 * point[0])))

        bayesian(step_s, strategy_at, np.array([[4.0], [32.0], [16.0], [8.0]]) / 64, np.linspace(0, 1, 1000)[:, None], 21)
    return step_s


def as_bagua(experiment: Experiment, base: DistributedStrategy, inner: tuple[str, ...]) -> Counted:
    """As Bagua's autotune service: 60 samples of the bucket size, 2^10 to 2^31 bytes, and hierarchy; the first 20 of a Halton sequence."""
    step_s = Counted(step_time(shortened(experiment)))

    def strategy_at(point: np.ndarray) -> DistributedStrategy:
        hierarchy = inner[round(float(point[1])) if len(inner) > 1 else 0]
        return with_hierarchy(base, hierarchy).replace(fuse_grad_size_in_MB=2.0 ** (10 + round(21 * float(point[0])) - 20))

    asked = np.array([(size / 21, hierarchy) for size in range(22) for hierarchy in range(len(inner))], dtype=float)
    first = qmc.Halton(2, scramble=False).random(20)
    first[:, 0], first[:, 1] = np.round(21 * first[:, 0]) / 21, np.round(first[:, 1]) * (len(inner) > 1)
    bayesian(step_s, strategy_at, first, asked, 60)
    return step_s


def with_hierarchy(base: DistributedStrategy, variant: str) -> DistributedStrategy:
    """As the tuner's candidates have it."""
    return base if variant == "off" else base.replace(use_hierarchical_allreduce=True, hierarchical_variant=variant)


def rivals(experiment: Experiment, limit_s: float) -> dict[str, Counted]:
    """What other searches try; Horovod's and Bagua's are given the 16-bit wire where it is allowed."""
    space = search_space(experiment)
    values = dict(space.choices)
    base = experiment.strategy.replace(bf16_allreduce="bf16" in values.get("wire", ()), fuse_grad_count=0)
    inner = ("off", "leader") if "hierarchy" in values else ("off",)
    return {
        "random": at_random(experiment, space, limit_s),
        "tpe": by_tpe(experiment, space, limit_s),
        "horovod": as_horovod(experiment, base, inner),
        "bagua": as_bagua(experiment, base, inner),
    }


def tuned(experiment: Experiment) -> tuple[dict[str, DistributedStrategy], dict[str, Any]]:
    """What ``fleetbench tune --simulate-only`` recommends, and which of its best is fastest on its own seeds; with what it cost."""
    stages: dict[str, float] = {}
    began = cpu_s()

    def note(stage: str, _: int, __: int) -> None:
        stages.setdefault(stage, cpu_s() - began)

    with tempfile.TemporaryDirectory() as out:
        found, _ = tune_simulated(experiment, out=Path(out), progress=note)
    whole_s = cpu_s() - began
    least = min(found.runners_up, key=lambda rival: rival.step_s, default=None)
    fastest = found.strategy if least is None or found.step_s <= least.step_s else least.strategy
    search_s = next(seconds for stage, seconds in stages.items() if stage.startswith("try the best"))
    cost = {"trials": found.num_trials, "search_cpu_s": search_s, "answer_cpu_s": whole_s, "notes": found.notes}
    return {"ours": found.strategy, "fastest": fastest}, cost


def row_of(experiment: Experiment, on: Where = "local") -> dict[str, Any]:
    """One file: what its space has, what every method chose, and at what regret."""
    began = cpu_s()
    num_combinations, times = enumerated(experiment, on)
    enumerated_s = cpu_s() - began
    choices, cost = tuned(experiment)
    choices["default"] = experiment.strategy
    simulations: dict[str, Any] = {}
    if experiment.strategy.mode == "collective":
        choices["advice"] = advice_for(experiment, table_for(experiment)).strategy
        for method, found in rivals(experiment, cost["search_cpu_s"]).items():
            simulations[method] = len(found.times)
            choices[method] = found.best(experiment)
    best = sorted(times, key=lambda strategy: times[strategy])[:MOST_AGAIN]
    fresh = on_seeds(experiment, [*best, *choices.values()], FRESH)
    least_s = min(fresh[strategy] for strategy in best)
    return {
        "combinations": num_combinations,
        "plans": len(times),
        "enumerated_cpu_s": round(enumerated_s, 1),
        **{key: round(value, 2) if isinstance(value, float) else value for key, value in cost.items()},
        "simulations": simulations,
        "best_s": least_s,
        "regret": {method: round(fresh[strategy] / least_s - 1, 6) for method, strategy in choices.items()},
        "best": min(best, key=lambda strategy: fresh[strategy]).changes(),
        "chosen": choices["ours"].changes(),
        "cpu_s": round(cpu_s() - began, 1),
        "file": encode(experiment) | {"tune": {name: values for name, values in search_space(experiment).choices if name != "fusion"}},
    }


def few_of(experiment: Experiment) -> dict[str, float]:
    """Mean time, on the fresh seeds, of what ``tune.trials`` simulations find: at random, and proposed as the tuner does it."""
    found = at_random(experiment, search_space(experiment), math.inf, experiment.tune.trials)
    proposing = experiment.replace(tune=dataclasses.replace(experiment.tune, search_seconds=0.0))
    with tempfile.TemporaryDirectory() as out:
        proposed = Counted.of(ranked(proposing, out=Path(out)).step_s)
    chosen = {"random": found.best(experiment), "tpe": proposed.best(experiment)}
    fresh = on_seeds(experiment, chosen.values(), FRESH)
    return {method: fresh[strategy] for method, strategy in chosen.items()}


def measure(seed: int, name: str, row_of: Callable[[Experiment], dict[str, Any]], kinds: Sequence[Kind] = (fixed, drawn)) -> None:
    """All files of some kinds, one after the other, into the file ``name``."""
    print(f"seed {seed}", flush=True)
    head = {"commit": commit(), "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "seed": seed, "machine": machine()}
    rows = []
    for kind in kinds:
        for title, experiment in kind(seed):
            rows.append({"which": kind.__name__, "name": title, **row_of(experiment)})
            print(rows[-1]["name"], rows[-1].get("regret", rows[-1]), flush=True)
            lines = ",\n".join(map(json.dumps, rows))
            (HERE / name).write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")


METHODS = ("ours", "fastest", "random", "tpe", "advice", "horovod", "bagua", "default")
FEW = ("tpe", "random")
KINDS = (("regret", METHODS), ("few", FEW))


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    regrets = [f"{100 * row[kind][method]:.2f}" if method in row[kind] else "" for kind, methods in KINDS for method in methods]
    cells = [row["name"], f"{row['combinations']:,}", f"{row['plans']:,}", f"{row['trials']:,}", f"{row['search_cpu_s']:.0f}"]
    return f"| {' | '.join([*cells, *regrets])} |"


def show() -> None:
    """The table, and what is asked."""
    rows, few, larger = (json.loads((HERE / name).read_text(encoding="utf-8"))["rows"] for name in (ALL, SOME, LARGE))
    for place, row in enumerate([*rows, *larger]):
        found = few[place]["step_s"] if place < len(few) else {}
        row["few"] = {method: seconds / row["best_s"] - 1 for method, seconds in found.items()}
    names = ("file", "combinations", "plans", "simulated", "CPU s", *METHODS, *(f"{method}, 150" for method in FEW))
    print(f"| {' | '.join(names)} |")
    print("|---" * len(names) + "|")
    print("\n".join(map(line_of, [*rows, *larger])))
    for title, chosen in (("the twelve", rows), ("drawn", [row for row in rows if row["which"] == "drawn"]), ("large", larger)):
        for kind, methods in KINDS:
            for method in methods:
                if own := [100 * row[kind][method] for row in chosen if method in row[kind]]:
                    print(f"{title}, {kind}, {method}: median {statistics.median(own):.2f} %, at most {max(own):.2f} %")


def main() -> None:
    """As the arguments say."""
    arguments, on = sys.argv[1:], "local"
    if arguments[:2] == ["--on", "ray"]:
        arguments, on = arguments[2:], "ray"
    of_file = partial(row_of, on=on)
    match arguments:
        case ["--print"]:
            show()
        case ["--few", seed]:
            measure(int(seed), SOME, lambda experiment: {"step_s": few_of(experiment) if experiment.strategy.mode == "collective" else {}})
        case ["--large"]:
            measure(secrets.randbelow(10**9), LARGE, of_file, (large,))
        case ["--seed", seed]:
            measure(int(seed), ALL, of_file)
        case _:
            measure(secrets.randbelow(10**9), ALL, of_file)


if __name__ == "__main__":
    main()
