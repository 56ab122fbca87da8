"""How far is the finalist from the best strategy where the simulator errs by families? Replays of planted errors, without a launch.

Run from the repository's root: ``python reports/tuner/bias.py [REPLAYS]``. Writes ``bias.json`` and prints README.md's table.

A space is every different strategy of an experiment, simulated; local steps have a price in updates at which the best of each K takes
as long to the target, give or take 5 %. A replay plants a truth: the simulated time times the exponential of an error. Legs are the
truth with noise. A method chooses by legs of a few strategies; its regret is its choice's true time over the best's, less 1.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fleetbench.experiment import Experiment
from fleetbench.store import machine, versions
from fleetbench.strategy import DistributedStrategy
from sim.many.objective import StepTime
from tuner.bias import named
from tuner.search import Search, Tried, different, shortened
from tuner.space import Equivalence, Parameters, parameters_of, search_space

HERE = Path(__file__).parent
ERRORS = (0.03, 0.10, 0.25)
RESIDUAL, LEG = 0.01, 0.021
"""Deviations of a strategy's own error, and of a leg; two legs make a pair of 0.03."""
FINALISTS = 3
Floats = npt.NDArray[np.float64]
CLUSTERS: dict[str, dict[str, Any]] = {
    "8 x 8, 10 Gbit/s": {"nodes": 8, "trainers_per_node": 8, "inter": {"bandwidth": "10 Gbit/s", "latency": "30 us"}},
    "8 x 8, 100 Gbit/s": {"nodes": 8, "trainers_per_node": 8, "inter": {"bandwidth": "100 Gbit/s", "latency": "10 us"}},
    "4 x 4, 25 Gbit/s": {"nodes": 4, "trainers_per_node": 4, "inter": {"bandwidth": "25 Gbit/s", "latency": "50 us"}},
    "2 x 2, 1 Gbit/s": {"nodes": 2, "trainers_per_node": 2, "inter": {"bandwidth": "1 Gbit/s", "latency": "100 us"}},
}
LOSS = {"start": 2.0, "floor": 0.1, "half_life": "20 steps"}
EVEN = [{"name": "block", "params": 3_000_000, "forward": "2 ms", "backward": "4 ms", "repeat": 16}]
UNEVEN = [
    {"name": "head", "params": 20_000_000, "forward": "1 ms", "backward": "2 ms"},
    {"name": "block", "params": 200_000, "forward": "1 ms", "backward": "2 ms", "repeat": 40},
]


def space_of(cluster: dict[str, Any], layers: list[dict[str, Any]]) -> Search:
    """Every different strategy, simulated, the default first."""
    data = {
        "name": "planted",
        "workload": {"model": "layers", "layers": layers, "target_loss": 0.5, "loss_curve": LOSS},
        "cluster": {"intra": {"bandwidth": "200 Gbit/s", "latency": "5 us"}, **cluster},
        "tune": {"local_steps": [1, 4, 16]},
    }
    experiment = Experiment.from_dict(data)
    same, step_s = Equivalence(experiment), StepTime(shortened(experiment))
    own = experiment.strategy
    strategies = {same.key(own): own, **different(search_space(experiment), same, [own])}
    tried = [Tried(one, step_s(one), key, None if number else "default") for number, (key, one) in enumerate(strategies.items())]
    return Search(tuple(tried))


def of_families(found: Search, scale: float, generator: np.random.Generator) -> Floats:
    """An error for each family: same arithmetic, rounded, other training, and both."""
    return _grouped([(one["wire"] != "fp32", one["local_steps"] != 1) for one in _parameters(found)], scale, generator)


def of_plans(found: Search, scale: float, generator: np.random.Generator) -> Floats:
    """An error for each of nine combinations of wire and hierarchy."""
    return _grouped([(one["wire"], one["hierarchy"]) for one in _parameters(found)], scale, generator)


def _parameters(found: Search) -> list[Parameters]:
    return [parameters_of(tried.strategy) for tried in found.tried]


def _grouped(families: list[tuple[object, ...]], scale: float, generator: np.random.Generator) -> Floats:
    drawn = {family: generator.normal(0, scale) for family in dict.fromkeys(families)}
    return np.array([drawn[family] for family in families])


def of_parameters(found: Search, scale: float, generator: np.random.Generator) -> Floats:
    """A sum of an error for each value of each of seven parameters; of deviation ``scale``."""
    names = [name for name in _parameters(found)[0] if name != "thread_num"]
    values = list(dict.fromkeys((name, one[name]) for one in _parameters(found) for name in names))
    drawn = {value: generator.normal(0, scale / np.sqrt(len(names))) for value in values}
    return np.array([sum(drawn[name, one[name]] for name in names) for one in _parameters(found)])


class Replay:
    """A planted truth, whose legs are counted."""

    def __init__(self, found: Search, errors: Floats, generator: np.random.Generator) -> None:
        self.found, self.generator = found, generator
        self.simulated = np.log([tried.simulated_s for tried in found.tried])
        self.truth = self.simulated + errors + generator.normal(0, RESIDUAL, len(errors))
        self.place = {tried.strategy: place for place, tried in enumerate(found.tried)}
        self.num_legs = 0

    def legs(self, strategies: Sequence[DistributedStrategy], count: int) -> dict[DistributedStrategy, float]:
        """Logarithms of mean times over the default's, which runs as often."""
        self.num_legs += count * (1 + len(strategies))
        noise = self.generator.normal(0, LEG / np.sqrt(count), 1 + len(strategies))
        own = self.truth[0] + noise[0]
        return {one: self.truth[self.place[one]] + more - own for one, more in zip(strategies, noise[1:], strict=True)}

    def regret(self, measured: dict[DistributedStrategy, float]) -> float:
        """Of what was fastest, or of the default."""
        least = min(measured, key=lambda one: measured[one])
        chosen = self.truth[self.place[least]] if measured[least] < 0 else self.truth[0]
        return float(np.exp(chosen - self.truth.min()) - 1)


def priced(found: Search, generator: np.random.Generator) -> Search:
    """With times to the target: those of a step times what K costs in updates, which runs to the target have told."""
    ks = np.array([one["local_steps"] for one in _parameters(found)])
    step_s = np.array([tried.simulated_s for tried in found.tried])
    least = step_s[ks == 1].min()
    prices = {k: least / step_s[ks == k].min() * np.exp(generator.normal(0, 0.05)) if k > 1 else 1.0 for k in np.unique(ks)}
    times = [float(one * prices[k]) for one, k in zip(step_s, ks, strict=True)]
    return Search(tuple(dataclasses.replace(tried, simulated_s=time) for tried, time in zip(found.tried, times, strict=True)))


def top_five(replay: Replay) -> dict[DistributedStrategy, float]:
    """The fastest five by simulation, once each."""
    order = np.argsort(replay.simulated[1:], kind="stable")[:5] + 1
    return replay.legs([replay.found.tried[place].strategy for place in order], 1)


def stratified(replay: Replay, count: int = FINALISTS) -> dict[DistributedStrategy, float]:
    """The tuner without what it learns: the best of each family, twice."""
    return replay.legs([tried.strategy for tried in replay.found.best(count)], 2)


def learning(replay: Replay) -> dict[DistributedStrategy, float]:
    """The tuner: as many again, each named by what the legs before it say."""
    measured, own = stratified(replay), replay.found.default.strategy
    simulated = {
        tried.strategy: float(time - replay.simulated[0]) for tried, time in zip(replay.found.tried, replay.simulated, strict=True)
    }
    for _ in range(FINALISTS):
        if (following := named(own, measured, simulated)) is None:
            break
        measured |= replay.legs([following], 2)
    return measured


METHODS: dict[str, Callable[[Replay], dict[DistributedStrategy, float]]] = {
    "top five, once each": top_five,
    "three finalists, twice": stratified,
    "six finalists, twice": lambda replay: stratified(replay, 2 * FINALISTS),
    "three finalists and up to three named": learning,
}


def main(replays: int) -> None:
    """Write the raw result and print the table."""
    layers = [EVEN, UNEVEN, EVEN, UNEVEN]
    spaces = {name: space_of(CLUSTERS[name], model) for name, model in zip(CLUSTERS, layers, strict=True)}
    rows = []
    for kind, errors_of in (("families", of_families), ("plans", of_plans), ("parameters", of_parameters)):
        for scale in ERRORS:
            for name, method in METHODS.items():
                for number, (cluster, space) in enumerate(spaces.items()):
                    regrets, legs = [], []
                    for seed in range(replays):
                        generator = np.random.default_rng([seed, number, round(1000 * scale)])
                        found = priced(space, generator)
                        replay = Replay(found, errors_of(found, scale, generator), generator)
                        regrets.append(replay.regret(method(replay)))
                        legs.append(replay.num_legs)
                    row = {"kind": kind, "error": scale, "method": name, "cluster": cluster, "strategies": len(space.tried)}
                    rows.append(row | {"regrets": [round(regret, 5) for regret in regrets], "legs": float(np.mean(legs))})
                show(rows, kind, scale, name)
    data = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "machine": machine(), "versions": versions(), "rows": rows}
    (HERE / "bias.json").write_text(json.dumps(data) + "\n", encoding="utf-8")


def show(rows: list[dict[str, Any]], kind: str, scale: float, name: str) -> None:
    """One line of README.md's table."""
    chosen = [row for row in rows if (row["kind"], row["error"], row["method"]) == (kind, scale, name)]
    regrets = 100 * np.array([row["regrets"] for row in chosen])
    spaces = regrets.mean(1)
    print(
        f"| {kind} | {100 * scale:g} % | {name} | {regrets.mean():.1f} | {spaces.max():.1f} | {np.quantile(regrets, 0.95):.1f} "
        f"| {np.mean([row['legs'] for row in chosen]):.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
