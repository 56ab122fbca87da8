"""Combination: what a strategy combines. Every question about a strategy that its plan does not answer is asked here."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

from fleetbench.plan.adaptive_k import AdaptiveK
from fleetbench.plan.local_sgd import Cadence
from fleetbench.plan.loss_scaling import LossScaler
from fleetbench.plan.outer import Fragments, Outer
from fleetbench.plan.rounds import Constant, Rounds, Varying, rounds_of
from fleetbench.sharding_configs import ShardingConfigs
from fleetbench.strategy import DistributedStrategy

MOMENTA = frozenset({"momentum_buffer", "exp_avg"})
"""Names of the means of past gradients that optimizers move parameters by; second moments and counts of steps are none."""
OUTSIDE = 2
"""Steps of a run that lie in none of its whole rounds, the first and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Accumulation x cadence x scaler, and what else is the same in every step. A value: under one plan, equal ones decide alike."""

    steps_per_update: int = 1
    remainder: Literal["carry", "flush", "drop"] = "carry"
    """What becomes of steps without an update that an epoch's end leaves over."""
    averages_gradient: bool = True
    """The merged gradient is the mean of the steps', rather than their sum."""
    lr_scale: float = 1.0
    """Factor of the optimizer's learning rate, in every update."""
    lr_counts_updates: bool = False
    """The learning rate's schedule counts updates, of which several steps may share one."""
    holds_statistics: bool = False
    """Batch-norm statistics move once an update."""
    cadence: Cadence | None = None
    """After which updates trainers that update alone average their parameters; none: they update together."""
    adaptive: AdaptiveK | None = None
    """When trainers meet follows what they observe: at every averaging they tell one another, so that all decide from the same."""
    outer: Outer | None = None
    """What steps on the averaged difference of a round; none: the average is taken as it is."""
    fragments: Fragments | None = None
    """Parts of the model with rounds of their own; none: a round's end exchanges and merges all of it."""
    feeds_back: bool = False
    """What quantising takes from a trainer's difference is added to its next one."""
    keeps_on_host: bool = False
    """What trainers agreed on and the outer momentum lie in the host's memory."""
    averages_state: bool = False
    """With parameters, trainers average the optimizer's state."""
    resets_state: bool = False
    momentum_alone: bool = False
    """Of the optimizer's state, momentum alone is averaged or reset."""
    averages_buffers: bool = False
    scaler: LossScaler | None = None
    updates_by_bucket: bool = False
    """A bucket's parameters update as it arrives."""
    fuses_update: bool = False
    """One update of all parameters."""
    finds_unused: bool = False
    sharding: ShardingConfigs | None = None
    """The part of the model and of the optimizer's state that a trainer keeps; none: it keeps all of both."""
    is_sequential: bool = False
    """A trainer waits for every collective where it starts it."""

    @classmethod
    def of(cls, strategy: DistributedStrategy) -> Self:
        """What the fields of ``strategy`` come to."""
        merge, build = strategy.gradient_merge_configs, strategy.build_strategy
        return cls(
            steps_per_update=merge.k_steps,
            remainder=merge.remainder,
            averages_gradient=merge.avg,
            lr_scale=strategy.lr_scale,
            lr_counts_updates=merge.lr_per == "update",
            holds_statistics=merge.batch_norm_per == "update",
            cadence=Cadence.of(strategy) if strategy.is_local else None,
            adaptive=AdaptiveK(strategy.adaptive_localsgd_configs, strategy.lr_scale) if strategy.adaptive_localsgd else None,
            outer=Outer.of(strategy),
            fragments=Fragments.of(strategy),
            feeds_back=strategy.quantises and strategy.localsgd_configs.outer_error_feedback,
            keeps_on_host=strategy.localsgd and strategy.localsgd_configs.outer_on_host,
            averages_state=strategy.averages_state,
            resets_state=strategy.averaging.momentum == "reset",
            momentum_alone=strategy.averaging.momentum != "local" and strategy.averaging.optimizer_state == "local",
            averages_buffers=strategy.averaging.buffers == "average",
            scaler=LossScaler(strategy.amp_configs) if strategy.scales_loss else None,
            updates_by_bucket=not build.enable_backward_optimizer_op_deps,
            fuses_update=build.fuse_all_optimizer_ops,
            finds_unused=strategy.find_unused_parameters,
            sharding=strategy.sharding_configs if strategy.sharding else None,
            is_sequential=build.enable_sequential_execution,
        )

    @property
    def is_local(self) -> bool:
        """Trainers update alone and average parameters, rather than averaging gradients."""
        return self.cadence is not None

    def slots(self, names: Iterable[str]) -> tuple[str, ...]:
        """Of the names of an optimizer's state tensors, those that trainers average or reset."""
        return tuple(name for name in names if name in MOMENTA or not self.momentum_alone)

    @property
    def num_copies(self) -> int:
        """Copies of the parameters on the device for local steps: Theta, the outer momentum, the differences, what quantising took."""
        kept = 0 if self.keeps_on_host else 1 + (self.outer is not None and self.outer.momentum != 0)
        return kept + 1 + self.feeds_back if self.is_local else 0

    @property
    def rounds(self) -> Rounds:
        """How many updates lie between two meetings of the trainers."""
        return rounds_of(self.cadence)

    @property
    def steps_per_round(self) -> int:
        """Steps of a round: of the longest one of a schedule, or of one update where the length is not known before the training."""
        rounds = self.rounds
        k = rounds.k if isinstance(rounds, Constant) else self.cadence and self.cadence.k_steps
        return self.steps_per_update * (k or 1)

    def whole_rounds(self, steps: int) -> tuple[int, int] | None:
        """The first step, and a later one, between whose ends whole rounds lie; none where ``steps``, numbered from 1, hold no round.

        A round of Local SGD ends with the first step already, and training that ends in the middle of one averages once more: ``n``
        rounds from a first step to a last one would have ``n + 1`` exchanges. So neither these two steps count. Steps before the first
        round of a schedule that begins late do.
        """
        before = self.steps_per_update * (self.rounds.cadence.begin_step - 1) if isinstance(self.rounds, Varying) else 0
        rounds = (steps - OUTSIDE - before) // self.steps_per_round
        return (1, 1 + before + rounds * self.steps_per_round) if rounds > 0 else None

    @property
    def merges(self) -> bool:
        """Several steps share an update."""
        return self.steps_per_update > 1

    @property
    def scales(self) -> bool:
        """The update waits for ``found_inf``."""
        return self.scaler is not None

    @property
    def observes(self) -> frozenset[str]:
        """The scalars that have to be told."""
        adaptive = self.adaptive.observes if self.adaptive else frozenset()
        return adaptive | {"found_inf"} if self.scales else adaptive

    @property
    def leaves_averages(self) -> bool:
        """Every step's gradients are averaged and wait for the update as they are, as DistributedDataParallel leaves them."""
        return not (self.is_local or self.merges or self.updates_by_bucket or self.scales)
