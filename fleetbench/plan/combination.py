"""Combination: the settings that a strategy combines, apart from those in its plan."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Self

from fleetbench.plan.adaptive_k import AdaptiveK
from fleetbench.plan.elastic import Elastic
from fleetbench.plan.local_sgd import Cadence
from fleetbench.plan.loss_scaling import LossScaler
from fleetbench.plan.outer import Fragments, Outer
from fleetbench.plan.rounds import Constant, Rounds, Varying, rounds_of
from fleetbench.sharding_configs import ShardingConfigs
from fleetbench.strategy import DistributedStrategy

MOMENTA = frozenset({"momentum_buffer", "exp_avg"})
"""Names of the optimizer state tensors that average past gradients. Second moments and step counts are not
among them."""
OUTSIDE = 2
"""Number of steps of a run that belong to no whole round: the first and the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Settings that are the same in every step: gradient accumulation, averaging schedule, loss scaling and others.

    With the same plan, equal combinations make the same decisions.
    """

    steps_per_update: int = 1
    """Number of steps per update."""
    remainder: Literal["carry", "flush", "drop"] = "carry"
    """Treatment of gradients in the sum at the end of an epoch: keep them, update with them, or discard them."""
    averages_gradient: bool = True
    """Whether the merged gradient is the mean of the steps' gradients rather than their sum."""
    lr_scale: float = 1.0
    """Factor on the optimizer's learning rate, in every update."""
    lr_counts_updates: bool = False
    """Whether the learning rate's schedule counts updates, each of which may take several steps."""
    holds_statistics: bool = False
    """Whether batch-norm statistics change only once per update."""
    cadence: Cadence | None = None
    """Schedule by which trainers with local steps average their parameters, or None without local steps."""
    adaptive: AdaptiveK | None = None
    """Rule for an adaptive K. At every averaging, trainers exchange their observations so that all decide
    alike. None if K is not adaptive."""
    outer: Outer | None = None
    """Outer optimizer, which steps on the averaged difference of a round. None if trainers use the average
    itself."""
    worker_trainers: int = 1
    """Number of trainers that average gradients in every update, as one worker of local steps."""
    fragments: Fragments | None = None
    """Fragments of the model with their own rounds. None if the end of a round exchanges and merges the whole
    model."""
    elastic: Elastic | None = None
    """Rule for workers that come and go, or None if there are always the same trainers."""
    feeds_back: bool = False
    """Whether the quantisation error of a trainer's difference is added to its next difference."""
    keeps_on_host: bool = False
    """Whether the agreed parameters and the outer momentum are kept in the host's memory."""
    averages_state: bool = False
    """Whether trainers average the optimizer's state along with the parameters."""
    resets_state: bool = False
    """Whether trainers reset the optimizer's state when they average."""
    momentum_alone: bool = False
    """Whether trainers average or reset only the momentum of the optimizer's state."""
    averages_buffers: bool = False
    """Whether trainers average buffers along with the parameters."""
    scaler: LossScaler | None = None
    """Loss scaler, or None without loss scaling."""
    updates_by_bucket: bool = False
    """Whether each bucket's parameters are updated as soon as its exchange has ended."""
    fuses_update: bool = False
    """Whether one fused update covers all parameters."""
    finds_unused: bool = False
    """Whether parameters that the loss does not use are looked for in every backward that is exchanged."""
    is_static: bool = False
    """Whether the first backward that is exchanged shows which parameters the others use, and how often."""
    sharding: ShardingConfigs | None = None
    """Settings of sharding, or None if every trainer keeps the whole model and optimizer state."""
    is_sequential: bool = False
    """Whether a trainer waits for the end of each collective right after starting it."""

    @classmethod
    def of(cls, strategy: DistributedStrategy) -> Self:
        """Return the combination that the fields of ``strategy`` describe."""
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
            worker_trainers=strategy.worker_trainers,
            fragments=Fragments.of(strategy),
            elastic=Elastic.of(strategy),
            feeds_back=strategy.quantises and strategy.localsgd_configs.outer_error_feedback,
            keeps_on_host=strategy.localsgd and strategy.localsgd_configs.outer_on_host,
            averages_state=strategy.averages_state,
            resets_state=strategy.averaging.momentum == "reset",
            momentum_alone=strategy.averaging.momentum != "local" and strategy.averaging.optimizer_state == "local",
            averages_buffers=strategy.averaging.buffers == "average",
            scaler=LossScaler(strategy.amp_configs) if strategy.scales_loss else None,
            updates_by_bucket=not build.enable_backward_optimizer_op_deps,
            fuses_update=build.fuse_all_optimizer_ops,
            # of a merge's backwards, only the last is counted
            finds_unused=strategy.find_unused_parameters or (strategy.static_graph and merge.k_steps > 1),
            is_static=strategy.static_graph and merge.k_steps == 1 and not strategy.is_local,
            sharding=strategy.sharding_configs if strategy.sharding else None,
            is_sequential=build.enable_sequential_execution,
        )

    @property
    def is_local(self) -> bool:
        """Whether trainers take local steps and average parameters, rather than averaging gradients."""
        return self.cadence is not None

    @property
    def exchanges_gradients(self) -> bool:
        """Whether updates exchange gradients: among all trainers, or within workers of several trainers."""
        return not self.is_local or self.sharding is not None or self.worker_trainers > 1

    def slots(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of ``names``, names of optimizer state tensors, that trainers average or reset."""
        return tuple(name for name in names if name in MOMENTA or not self.momentum_alone)

    @property
    def num_copies(self) -> int:
        """Number of copies of the parameters that local steps keep on the device.

        They are the agreed parameters and the outer momentum, unless kept on the host, the differences, and
        the quantisation error.
        """
        kept = 0 if self.keeps_on_host else 1 + (self.outer is not None and self.outer.momentum != 0)
        return kept + 1 + self.feeds_back if self.is_local else 0

    @property
    def rounds(self) -> Rounds:
        """Lengths of the rounds between synchronisations, in updates: constant, varying, or known only in training."""
        return rounds_of(self.cadence)

    @property
    def steps_per_round(self) -> int:
        """Number of steps in the longest round of the schedule.

        If that is not known before training, the number of steps per update.
        """
        rounds = self.rounds
        k = rounds.k if isinstance(rounds, Constant) else self.cadence and self.cadence.k_steps
        return self.steps_per_update * (k or 1)

    def whole_rounds(self, steps: int) -> tuple[int, int] | None:
        """Return steps ``a`` and ``b`` such that steps ``a + 1`` to ``b`` form as many whole rounds as possible.

        None if ``steps``, numbered from 1, contain no such round. A round of Local SGD already ends with the
        first step, and training that ends within a round averages once more, so ``n`` rounds between the
        first and the last step would have ``n + 1`` exchanges. These two steps therefore do not count. Steps
        before the first round of a schedule that begins late do count.
        """
        before = self.steps_per_update * (self.rounds.cadence.begin_step - 1) if isinstance(self.rounds, Varying) else 0
        rounds = (steps - OUTSIDE - before) // self.steps_per_round
        return (1, 1 + before + rounds * self.steps_per_round) if rounds > 0 else None

    @property
    def merges(self) -> bool:
        """Whether several steps share an update."""
        return self.steps_per_update > 1

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled, so that updates wait for ``found_inf``."""
        return self.scaler is not None

    @property
    def observes(self) -> frozenset[str]:
        """Names of the scalars that the executor has to report."""
        adaptive = self.adaptive.observes if self.adaptive else frozenset()
        return adaptive | {"found_inf"} if self.scales else adaptive

    @property
    def leaves_averages(self) -> bool:
        """Whether every step's averaged gradients stay unchanged until the update, as in DDP."""
        return not (self.is_local or self.merges or self.updates_by_bucket or self.scales)
