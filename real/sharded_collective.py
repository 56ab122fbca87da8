"""ShardedCollective: the implementation of ``fleet`` in a job whose model is sharded."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.collective import Collective, add_ddp_attributes, arrive
from real.engine.refusals import one_number, refuse_nonlinear, refuse_untrainable
from real.models import MODEL
from real.processes.roles import TUNING, role_of
from real.sharding.engine import OPTIMIZER, ShardedEngine
from real.supported import refuse_unshardable_strategy

if TYPE_CHECKING:
    from real.checkpoints.saving import Loaded

_FIELD = "strategy.sharding"


class ShardedCollective(Collective):
    """A trainer's part in a job with one sharded model, which a ``ShardedEngine`` trains; see ``Collective``."""

    _engine: ShardedEngine | None = None

    def __init__(self, strategy: DistributedStrategy, timeout_s: float) -> None:
        """Join the other trainers. Raises ``ConfigError`` for unsupported strategies, and in a tuning."""
        if os.environ.get(TUNING):
            arrive(role_of(os.environ).rank)  # so that the error is reported to the driver
            what = "a script with a sharded model is neither profiled nor tuned: legs leave the model whole"
            hint = "compare launches of the script with different sharding_configs"
            raise ConfigError(what, _FIELD, "true", hint)
        super().__init__(strategy, timeout_s)
        refuse_unshardable_strategy(strategy, self.trainers)

    def distributed_model(self, model: nn.Module, strategy: DistributedStrategy | None = None) -> nn.Module:
        """Start all trainers from rank 0's parameters and buffers, and shard the model; return the same model."""
        refuse_untrainable(model)
        if strategy is not None:
            what = "is of fleet's four lines, and this script wraps its model in DistributedDataParallel"
            raise ConfigError(
                what,
                _FIELD,
                "true",
                "write the four lines, or torch.distributed.fsdp.fully_shard, into the script",
            )
        if self._engine is not None:
            is_same = self._engine.model is model
            what = "is sharded already" if is_same else "is the second model of a process, and one is sharded"
            hint = "call it once; train models beside the sharded one without fleet"
            raise ConfigError(what, MODEL, type(model).__name__, hint)
        self._follow(next(model.parameters()).device)
        self._engine = ShardedEngine(model, self._strategy, self.communicators)
        add_ddp_attributes(model, join=self._refuse_join, no_sync=self._engine.no_sync)
        return model

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Let the optimizer's steps be the strategy's updates of this trainer's shards."""
        refuse_nonlinear(self._strategy, optimizer)
        self._of(OPTIMIZER).attach_optimizer(optimizer)
        return optimizer

    def no_sync(self) -> AbstractContextManager[None]:
        """See ``ShardedEngine.no_sync``."""
        return self._of("fleet.no_sync").no_sync()

    def join(self, **_: bool) -> NoReturn:
        """Raise ``ConfigError``: shards are gathered from all trainers in every step."""
        self._refuse_join()

    def synchronize(self) -> None:
        """Make trainers agree after local steps; without local steps they agree after every update."""
        engine = self._of("fleet.synchronize")
        engine.between_steps("fleet.synchronize")
        engine.flush()

    pull_model = synchronize

    def report(self, loss: torch.Tensor | float, _: Mapping[str, torch.Tensor | float]) -> None:
        """Check that the loss is one number. It has no effect, and metrics are only for tunings."""
        self._of("fleet.report")
        one_number(loss)

    def end_epoch(self) -> None:
        """End an epoch of the data; a gradient merge continues into the next."""
        self._of("fleet.end_epoch").end_epoch()

    def save(self, path: Path, *, extra: object) -> None:
        """Save everything that training needs to resume; every trainer saves its shards."""
        from real.sharding.checkpoint import save  # imported late, because not every training saves

        save(self._of("fleet.save_persistables"), self.meeting, path, extra=extra)

    def load(self, path: Path, *, predicate: Callable[[str], bool] | None, **_: object) -> Loaded:
        """Resume from a save. Trainers and stage may differ from those that saved, without ``resynchronize``."""
        from real.checkpoints.saving import LOAD
        from real.sharding.checkpoint import load

        if predicate is not None:
            hint = "load it before fleet.distributed_model, which starts all from rank 0's parameters"
            raise ConfigError("takes all of a sharded model, or nothing", f"{LOAD}(predicate=...)", hint=hint)
        return load(self._of(LOAD), self.meeting, path)

    def save_inference_model(self, path: Path, *_: object) -> NoReturn:
        """Raise ``ConfigError``: only a whole model is exported."""
        hint = "gather it by torch.distributed.checkpoint.state_dict.get_model_state_dict, and torch.export a plain model with that"
        raise ConfigError("exports a model that is whole, and this one is sharded", "fleet.save_inference_model", str(path), hint)

    def num_steps(self) -> int:
        """Return the number of steps that have begun."""
        return 0 if self._engine is None else self._engine.step

    def _of(self, where: str) -> ShardedEngine:
        """Return the engine. Raises ``ConfigError`` if there is none."""
        if self._engine is None:
            raise ConfigError("there is no model yet", where, hint=f"call {MODEL} first")
        return self._engine

    @staticmethod
    def _refuse_join(*_: Any, **__: Any) -> NoReturn:
        hint = "give every trainer as many batches: DistributedSampler does so, with or without drop_last"
        raise ConfigError(
            "cannot stand in for trainers without data, whose shards the others gather",
            "fleet.join",
            hint=hint,
        )
