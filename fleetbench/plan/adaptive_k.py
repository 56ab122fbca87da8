"""Adaptive Local SGD: K follows the training loss and the learning rate.

Four published rules (``adaptive_localsgd_configs.variant``). K0 is the first K; loss0 and lr0 are the
averaged loss and the learning rate at the first synchronisation:

- ``fleet``: K = clamp(ceil(sqrt(lr0 loss / (lr loss0) K0)), 1, 16), as in Fleet's optimizer;
- ``paper``: K = ceil(K0 sqrt(lr0 / lr loss / loss0)), at least 1 (AdaComm, arXiv 1810.08313);
- ``document``: K = int(K0 sqrt(lr0 (loss - 0.6) / (lr max(loss0 - 0.6, 1e-12)))), at least 1, once
  per epoch; K is unchanged if it would grow by more than 20;
- ``qsr``: K = max(K0, floor((alpha / lr)^2)) (quadratic synchronisation rule, arXiv 2310.14423).

If a formula has no value (a loss that is NaN, a learning rate of 0, ...), K is unchanged and
``AdaptiveStepsKept`` gives the reason.
"""

import dataclasses
import math
import warnings
from dataclasses import dataclass

from fleetbench.strategy import AdaptiveLocalSGDConfigs

FLEET_MAX_K = 16
DOCUMENT_LOSS_FLOOR = 0.6
DOCUMENT_MAX_GROWTH = 20


class AdaptiveStepsKept(UserWarning):
    """Warns that the rule for K has no value for this loss and learning rate, so K is unchanged."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """State of an adaptive strategy's rounds: plain data, part of the saved state."""

    k: int
    """Number of updates in the current round."""
    loss0: float | None = None
    """Averaged loss at the first synchronisation with a usable loss; None before it."""
    lr0: float | None = None
    """Learning rate at the synchronisation that gave ``loss0``; None before it."""
    lr: float | None = None
    """Learning rate at the last synchronisation; None before the first."""


@dataclass(frozen=True, slots=True)
class AdaptiveK:
    """Chooses K, the number of updates per round.

    Life cycle: call ``start`` once. After each update that synchronises, call ``on_lr``, and then ``on_loss``
    if ``wants_loss`` is true. K is fixed within a round, so do not call them after other updates.
    """

    configs: AdaptiveLocalSGDConfigs
    lr_scale: float = 1.0
    """Factor by which every reported learning rate is multiplied."""

    @property
    def observes(self) -> frozenset[str]:
        """Names of the scalars that the executor has to report: the learning rate, and the loss except for ``qsr``."""
        return frozenset({"lr"} if self.configs.variant == "qsr" else {"lr", "loss"})

    def start(self) -> Rounds:
        """Return the state of the first round."""
        return Rounds(self.configs.init_k_steps)

    def wants_loss(self, rounds: Rounds, update: int, epoch_ended: bool) -> bool:
        """Whether the synchronisation after ``update`` averages the trainers' losses.

        Call this only for updates that synchronise. ``epoch_ended`` says whether an epoch has ended since the
        last loss was averaged, or ends with this update. Warm-up updates (below 1) average no loss.
        """
        if self.configs.variant == "qsr" or update < 1:
            return False
        if update == 1 or rounds.loss0 is None:
            return True
        return epoch_ended if self.configs.variant == "document" else update > self.configs.begin_step

    def on_lr(self, rounds: Rounds, lr: float) -> Rounds:
        """Record the learning rate at a synchronisation; ``qsr`` computes the next K from it."""
        seen = dataclasses.replace(rounds, lr=lr * self.lr_scale)
        return self._choose(seen) if self.configs.variant == "qsr" else seen

    def on_loss(self, rounds: Rounds, loss: float, update: int) -> Rounds:
        """Record the loss averaged over all trainers after ``update``; call ``on_lr`` first.

        The first usable loss becomes ``loss0``, whichever update it belongs to, because training may have
        been resumed. Later losses give the next K.
        """
        assert rounds.lr is not None, "on_lr comes before on_loss"
        if rounds.loss0 is not None:
            return self._choose(rounds, loss) if update > 1 else rounds
        fault = _fault(rounds.lr, loss)
        if fault is None and loss <= 0 and self.configs.variant != "document":
            fault = "the averaged loss is not above 0"
        if fault is None:
            return dataclasses.replace(rounds, loss0=loss, lr0=rounds.lr)
        _warn(fault, rounds.k)
        return rounds

    def _choose(self, rounds: Rounds, loss: float = 0.0) -> Rounds:
        assert rounds.lr is not None
        fault = _fault(rounds.lr, loss)
        if fault is None:
            try:
                return dataclasses.replace(rounds, k=self._next(rounds, loss))
            except ArithmeticError:
                fault = "the rule's formula overflows"
            except ValueError as error:
                fault = str(error)
        _warn(fault, rounds.k)
        return rounds

    def _next(self, rounds: Rounds, loss: float) -> int:
        variant, first_k, lr = self.configs.variant, self.configs.init_k_steps, rounds.lr
        assert lr is not None
        if variant == "qsr":
            # a quotient of decimals, such as 0.3 / 0.1, may be rounded to just below the intended whole
            # number
            return max(first_k, math.floor(_finite((self.configs.alpha / lr) * (self.configs.alpha / lr)) * (1 + 1e-12)))
        loss0, lr0 = rounds.loss0, rounds.lr0
        assert loss0 is not None
        assert lr0 is not None
        if variant == "document":
            if loss < DOCUMENT_LOSS_FLOOR:
                raise ValueError(f"the averaged loss is below {DOCUMENT_LOSS_FLOOR}, where the document's formula has no root")
            above = lr0 * (loss - DOCUMENT_LOSS_FLOOR) / (lr * max(loss0 - DOCUMENT_LOSS_FLOOR, 1e-12))
            k = max(1, int(_finite(first_k * math.sqrt(above))))
            return rounds.k if k - rounds.k > DOCUMENT_MAX_GROWTH else k
        if loss < 0:
            raise ValueError("the averaged loss is below 0, where the formula has no root")
        ratio = _finite(lr0 * loss / (lr * loss0))
        if variant == "paper":
            return max(1, math.ceil(first_k * math.sqrt(ratio)))
        return min(max(1, math.ceil(math.sqrt(ratio * first_k))), FLEET_MAX_K)


def _fault(lr: float, loss: float) -> str | None:
    if not (math.isfinite(lr) and lr > 0):
        return f"the learning rate is {lr:g}"
    return None if math.isfinite(loss) else f"the averaged loss is {loss:g}"


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise OverflowError
    return value


def _warn(why: str, k: int) -> None:
    warnings.warn(f"{why}: K stays {k}", AdaptiveStepsKept, stacklevel=4)
