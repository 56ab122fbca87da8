"""Churn: what to run on nodes that leave and come back: synchronous training with checkpoints, or elastic local steps.

Each number of local steps is simulated under each policy at several checkpoint intervals, among them Young's
and Daly's. All see the same nodes come and go, so that they also pay for the same time.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fleetbench.config import Config
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from sim.churn.availability import Availability
from sim.churn.goodput import CONFIDENCE, KINDS, Goodput, RoundTimes, availabilities, failures, goodput
from sim.churn.intervals import daly, young
from sim.churn.job import Kind, Policy
from sim.many.seeds import Interval
from tuner.notes import Note, Remark, left_out
from tuner.simulated import candidates

MULTIPLES = (0.5, 2.0)
"""Multiples of Daly's interval that are tried besides it."""
EQUAL = "samples count as equal under all K: what local steps, and a global batch that varies, cost in loss is not known here"
BATCH = "with fewer nodes the global batch is smaller; what that does to the loss is not simulated"

_SPREAD = ("nccl_comm_num", "use_hierarchical_allreduce", "fp16_allreduce", "bf16_allreduce")
"""Fields that elastic workers exclude, and that change only how an average is exchanged."""

SamplesToTarget = Callable[[DistributedStrategy], float | None]
"""Samples to the target as a multiple of those of the experiment's own strategy; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Config):
    """A strategy under a policy at one checkpoint interval."""

    strategy: DistributedStrategy
    rule: str
    """Origin of the interval: ``Young``, ``Daly``, ``declared``, or empty."""
    failures: int
    """Number of failures that the policy does not survive, over all seeds."""
    samples_to_target: float
    """Samples to the target, as a multiple of those of the experiment's own strategy; 1 if unknown."""
    goodput: Goodput

    @property
    def rate(self) -> float:
        """Useful samples per second, divided by ``samples_to_target``."""
        return self.goodput.samples_per_s / self.samples_to_target

    @property
    def price(self) -> float | None:
        """Price of the progress of a million samples of the experiment's own strategy."""
        return None if self.goodput.price is None else self.goodput.price * self.samples_to_target

    @property
    def origin(self) -> str:
        """``rule``, or in place of ``Daly`` that its mean time between failures was not seen."""
        if self.failures or self.rule != "Daly":
            return self.rule
        return f"no loss{' of all nodes' if self.goodput.policy == 'elastic' else ''} seen"

    @property
    def words(self) -> str:
        """Policy, K and interval."""
        one, by = self.goodput, f" ({self.origin})" if self.origin else ""
        taken_in = ", nodes taken in at restarts only" if one.policy == "synchronous" and one.rejoin == "restart" else ""
        return f"{one.policy} training, K = {self.strategy.local_steps}, a checkpoint every {one.every}{by}{taken_in}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderChurn(Config):
    """Choices by ``rate``, the best first."""

    choices: tuple[Choice, ...]
    is_to_target: bool
    """Whether ``samples_to_target`` is known for all choices."""
    told: tuple[str, ...]

    @property
    def rivals(self) -> dict[str, Choice]:
        """Best choices of synchronous training at ``Young``'s and at ``Daly``'s interval."""
        found = [one for one in reversed(self.choices) if one.goodput.policy == "synchronous"]
        return {one.rule: one for one in found if one.rule in ("Young", "Daly")}

    @property
    def rows(self) -> list[Choice]:
        """Choices of a table: the best interval with each policy and K, and the rivals."""
        best = {(one.goodput.policy, one.strategy.local_steps): one for one in reversed(self.choices)}
        shown = [*best.values(), *self.rivals.values()]
        return [one for one in self.choices if any(one is each for each in shown)]

    @property
    def line(self) -> str:
        """The answer in one line."""
        best, answer = self.choices[0], f"SIMULATED, under cluster.churn: {self.choices[0].words}"
        if (rival := self.rivals.get("Daly")) is None or rival is best:
            return answer
        if 0 in (*best.goodput.by_seed, *rival.goodput.by_seed):  # no ratio
            return answer
        pairs = zip(best.goodput.by_seed, rival.goodput.by_seed, strict=True)
        found = Interval.of([math.log(one / other) for one, other in pairs], CONFIDENCE)
        of_samples = rival.samples_to_target / best.samples_to_target
        gain, low, high = (math.exp(log) * of_samples for log in (found.mean, found.low, found.high))
        return f"{answer}: {gain:.2f}x [{low:.2f}, {high:.2f}] the goodput of {rival.words}; the interval is of draws alone"


def under_churn(experiment: Experiment, strategies: Mapping[int, DistributedStrategy], samples_to_target: SamplesToTarget) -> UnderChurn:
    """Return the choices for an experiment with ``cluster.churn``.

    Args:
        experiment: has known layer times; its strategy is not used.
        strategies: a strategy by number of local steps, K.
        samples_to_target: if it is known for a strategy, only those are compared for which it is.

    Raises ``ConfigError`` if no strategy can be simulated.
    """
    available, churn, notes = availabilities(experiment), experiment.cluster.churn, list[Note]()
    assert churn is not None
    found, samples = list[Choice](), {one: samples_to_target(one) for one in strategies.values()}
    is_known = any(samples.values())
    for k, strategy in strategies.items():
        if is_known and samples[strategy] is None:
            notes.append(left_out(f"K = {k}", "is not compared under cluster.churn", "it is not known to reach the target"))
            continue
        for kind in KINDS if k > 1 else KINDS[:1]:  # elastic workers need local steps
            try:
                found += _choices(_under(kind, experiment, strategy), kind, available, samples[strategy] or 1.0)
            except ConfigError as error:
                notes.append(left_out(f"{kind} training with K = {k}", "is not compared under cluster.churn", error))
    if not found:
        raise ConfigError("no strategy can be simulated", "cluster.churn", "; ".join(map(str, notes)), "leave cluster.churn out")
    ranked = sorted(found, key=lambda one: -one.rate)
    notes.append(Remark(text=BATCH if is_known else EQUAL))
    return UnderChurn(choices=tuple(ranked), is_to_target=is_known, told=tuple(map(str, notes)))


def by_local_steps(experiment: Experiment, best: Iterable[DistributedStrategy], *, others: bool) -> dict[int, DistributedStrategy]:
    """Return a strategy for each K: the first of ``best`` that has it, or with ``others`` the first with its K changed."""
    found = dict[int, DistributedStrategy]()
    for strategy in best:
        if not strategy.adaptive_localsgd:
            found.setdefault(strategy.local_steps, strategy)
    first = next(iter(found.values()), experiment.strategy)
    for k in experiment.tune.local_steps if others else ():
        try:
            local = first.replace(localsgd=True, localsgd_configs={"k_steps": k})
            found.setdefault(k, local if k > 1 else first.without("localsgd"))
        except ConfigError:  # such as sharding, which excludes it
            continue
    return found


def _under(kind: Kind, experiment: Experiment, strategy: DistributedStrategy) -> Experiment:
    """Return the experiment with a strategy under a policy.

    Elastic workers exchange all in one sum: settings that spread it are left out. Raises ``ConfigError`` for others
    that they exclude.
    """
    if kind == "elastic":
        strategy = strategy.without(*_SPREAD).replace(localsgd_configs={"elastic": True})
    elif strategy.is_elastic:
        strategy = strategy.replace(localsgd_configs={"elastic": False, "elastic_lr": "constant"})
    return experiment.replace(strategy=strategy)


def _choices(experiment: Experiment, kind: Kind, available: Sequence[Availability], samples_to_target: float) -> list[Choice]:
    """Return the experiment's strategy at the intervals that are tried.

    If no failure was seen, no interval is longer than Daly's: the longest one would always be the best.
    """
    churn, times, found = experiment.cluster.churn, RoundTimes(candidates.shortened(experiment)), list[Choice]()
    assert churn is not None
    rejoins: tuple[Literal["checkpoint", "restart"], ...] = ("checkpoint", "restart") if kind == "synchronous" else ("checkpoint",)
    for rejoin in rejoins:
        number, mean_ns = failures(churn, available, kind, rejoin)
        best = daly(churn.checkpoint_time, mean_ns)
        rules = {round(best * multiple): "" for multiple in MULTIPLES}
        rules |= {} if churn.checkpoint_interval is None else {int(churn.checkpoint_interval): "declared"}
        rules |= {young(churn.checkpoint_time, mean_ns): "Young", best: "Daly"}
        for interval_ns, rule in rules.items():
            if number or interval_ns <= best:
                one = goodput(times, available, Policy(kind=kind, interval_ns=interval_ns, rejoin=rejoin))
                strategy, weight = experiment.strategy, samples_to_target
                found.append(Choice(strategy=strategy, rule=rule, failures=number, samples_to_target=weight, goodput=one))
    return found
