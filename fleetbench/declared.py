"""Declared scalars: losses, learning rates and epochs from the experiment file, for runs that train nothing.

No model learns in a simulation, nor on an emulated device, which sleeps instead of computing. Losses follow
the declared curve, the learning rate follows the declared decay, and an epoch has ``steps_per_epoch`` steps.
All executors read the same values, so strategies that depend on them make the same decisions.
"""

from dataclasses import dataclass

from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from fleetbench.target import Crossing, crossing
from fleetbench.workload import LossCurve, Workload

LOSSES = frozenset({"workload.loss_curve"})
"""Names of the fields from which a run that trains nothing takes its losses."""

UNFOLLOWED = "stale gradients do not follow a declared curve"
"""Reason why a run with parameter servers that trains nothing has no time to target."""


@dataclass(frozen=True, slots=True)
class DeclaredScalars:
    """Scalars from the experiment file: no gradient overflows, and losses follow a curve."""

    workload: Workload

    def scalar(self, name: str, rank: int, step: int) -> float:  # noqa: ARG002  # declared for all ranks
        """Return the scalar ``name`` at ``step``: ``loss`` (mean over trainers), ``found_inf`` or ``lr``.

        For ``lr`` with gradient merge, ``step`` may be a number of updates.
        """
        if name == "found_inf":
            return 0.0
        if name == "lr":
            return learning_rate(self.workload, step)
        assert name == "loss", f"no declaration of {name}"
        assert self.workload.loss_curve is not None, "``refuse_undeclared`` has checked this"
        return curve_loss(self.workload.loss_curve, step)

    def declared_loss(self, step: int) -> float | None:
        """Return the loss of the declared curve at ``step``; None without a curve."""
        return None if self.workload.loss_curve is None else curve_loss(self.workload.loss_curve, step)


def learning_rate(workload: Workload, step: int) -> float:
    """Return the workload's learning rate at ``step``, after its decays so far."""
    rate = workload.lr
    for decay in workload.lr_decay:
        rate *= decay.factor if step >= decay.step else 1.0
    return rate


def curve_loss(curve: LossCurve, step: int) -> float:
    """Return ``floor + (start - floor) / 2 ** (step / half_life)``; ``start`` during the warm-up."""
    return float(curve.floor + (curve.start - curve.floor) * 2.0 ** (-max(step, 0) / curve.half_life))


def declared_crossing(workload: Workload) -> Crossing | None:
    """Return the point at which the declared loss reaches the target; None if it does not."""
    if workload.loss_curve is None:
        return None
    evaluated = range(workload.eval_every, workload.steps + 1, workload.eval_every)
    return crossing([(step, curve_loss(workload.loss_curve, step)) for step in evaluated], workload.target_loss)


def refuse_undeclared(experiment: Experiment, strategy: DistributedStrategy, executor: str) -> None:
    """Raise ``ConfigError`` if ``strategy`` needs a loss or epochs that the file does not declare.

    ``executor`` is the executor's name in the error.
    """
    workload = experiment.workload
    if strategy.follows_loss and workload.loss_curve is None:
        hint = 'declare workload.loss_curve = { start = 2.3, floor = 0.2, half_life = "150 steps" }'
        raise ConfigError(f"adaptive steps follow a loss, and {executor} computes none", "strategy.adaptive_localsgd", "true", hint)
    if workload.steps_per_epoch is None and (name := _needs_epochs(strategy)) is not None:
        hint = "set workload.steps_per_epoch"
        raise ConfigError(f"counts epochs, and {executor} does not know how long one is", f"strategy.{name}", hint=hint)


def _needs_epochs(strategy: DistributedStrategy) -> str | None:
    """Return the first strategy field in use that depends on epochs; None if no field does."""
    local, merge = strategy.localsgd_configs, strategy.gradient_merge_configs
    if strategy.localsgd and local.schedule == "document" and (local.warmup != "const" or local.warmup_epochs):
        return "localsgd_configs.schedule"
    if strategy.adaptive_localsgd and strategy.adaptive_localsgd_configs.variant == "document":
        return "adaptive_localsgd_configs.variant"
    if strategy.gradient_merge and merge.k_steps > 1 and merge.remainder != "carry":
        return "gradient_merge_configs.remainder"
    return None
