"""Models: the models that one process trains, each with its own engine on the job's communicators."""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from weakref import ref

import torch
from torch import nn

from fleetbench.errors import ConfigError
from real.checkpoints.meeting import Meeting
from real.communication.communicators import Communicators
from real.engine.engine import Engine
from real.engine.fleet_engine import FleetEngine
from real.engine.uneven import UnevenInputs

MODEL = "fleet.distributed_model"


class Models:
    """The engines, one per model, in the order of ``fleet.distributed_model``.

    Iteration gives only those that ``fleet.distributed_model`` created. An engine lives as long as its model.
    If a script drops a model, such as that of an earlier fold, ``sweep`` forgets it. The last engine is kept,
    to warn at exit of an open round.
    """

    def __init__(self) -> None:
        self._found: list[ref[Engine]] = []
        self._last: Engine | None = None

    @property
    def engines(self) -> list[Engine]:
        """Engines whose models still exist."""
        return [engine for own in self._found if (engine := own()) is not None]

    def sweep(self, meeting: Meeting, *, collects: bool = False) -> None:
        """Forget models that any trainer's script has dropped; all trainers call it before engines communicate.

        With ``collects``, dropped models are freed first.
        """
        if len(self._found) < (1 if collects else 2):
            return
        if collects:
            self._last = None
            gc.collect()
        alive = meeting.gather([int(own() is not None) for own in self._found])
        self._found = [own for own, told in zip(self._found, zip(*alive, strict=True), strict=True) if all(told)]

    def __iter__(self) -> Iterator[FleetEngine]:
        """Iterate over the engines created by ``fleet.distributed_model``, not those of a driver's orders."""
        return (engine for engine in self.engines if isinstance(engine, FleetEngine))

    @property
    def have_agreed(self) -> bool:
        """Whether no trainer has updated by itself since all of them last agreed."""
        return all(engine.has_agreed for engine in self.engines)

    def put(self, engine: Engine) -> None:
        """Let this engine run its model from now on."""
        self._last = engine
        for index, own in enumerate(self._found):
            if (before := own()) is not None and before.model is engine.model:
                self._found[index] = ref(engine)
                return
        self._found.append(ref(engine))

    def forget(self, engine: Engine) -> None:
        """Forget an engine whose model is replaced by another; every trainer calls it."""
        self._found = [own for own in self._found if own() is not engine]
        self._last = None if self._last is engine else self._last

    def of(self, model: nn.Module) -> Engine | None:
        """Return the model's engine, or ``None``."""
        return next((engine for engine in self.engines if engine.model is model), None)

    def all(self, where: str) -> list[Engine]:
        """Return all engines. Raises ``ConfigError`` if there is none."""
        if not (engines := self.engines):
            raise ConfigError("there is no model yet", where, hint=f"call {MODEL} first")
        return engines

    def kept(self, where: str, meeting: Meeting) -> list[Engine]:
        """Return the engines whose models all trainers still have; every trainer calls it."""
        if len(self._found) > 1:
            self.sweep(meeting, collects=True)
        return self.all(where)

    def chosen(self, model: nn.Module | None, where: str, meeting: Meeting) -> tuple[int, Engine]:
        """Return number and engine of ``model``, or of the only one for ``None``; every trainer calls it.

        Raises ``ConfigError``, which lists the models, if there is no such model, or a choice.
        """
        engines = self.kept(where, meeting)
        found = [(number, engine) for number, engine in enumerate(engines) if model in (None, engine.model)]
        if len(found) != 1:
            what = "takes one of several models" if model is None else "is given a model that is not distributed"
            names = ", ".join(f"{number}: {type(engine.model).__name__}" for number, engine in enumerate(engines))
            raise ConfigError(what, where, names, "pass model=..., a model that fleet.distributed_model has returned")
        return found[0]

    def holding(self, optimizer: torch.optim.Optimizer, where: str) -> list[Engine]:
        """Return the engines of the models whose parameters the optimizer holds.

        Raises ``ConfigError`` if there are none, or several and the strategy does not allow that.
        """
        engines = self.all(where)
        if len(engines) == 1 or not hasattr(optimizer, "param_groups"):
            return engines[:1]
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = [engine for engine in engines if any(id(parameter) in held for parameter in engine.model.parameters())]
        if not found:
            hint = f"give its model to {MODEL} first"
            raise ConfigError("holds parameters of no distributed model", where, type(optimizer).__name__, hint)
        what = found[0].executor.combination
        if len(found) > 1 and (what.resets_state or what.lr_scale != 1):
            why = "is one for several models, and the strategy resets its state or scales its learning rate for each of them"
            raise ConfigError(why, where, type(optimizer).__name__, "give each model an optimizer of its own")
        return found

    @contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Let backwards inside keep their gradients on this trainer: for one model, or for all."""
        with ExitStack() as stack:
            for engine in self.all("fleet.no_sync"):
                if model in (None, engine.model):
                    stack.enter_context(engine.no_sync())
            yield

    def join(
        self,
        communicators: Communicators,
        model: nn.Module | None = None,
        *,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """See ``Fleet.join``, for one model, or for all."""
        where = "fleet.join" if model is None else "model.join"
        if not divide_by_initial_world_size:
            hint = "leave it out: gradients are divided by the number of all trainers"
            raise ConfigError("divides by the number of remaining trainers, which no strategy does", where, "False", hint)
        self.all(where)
        engines = [engine for engine in self if model in (None, engine.model)]
        if not enable or communicators.trainers == 1:
            return nullcontext()
        if not engines:
            raise ConfigError("is not supported in a profile or a tuning", where, hint="give all trainers the same number of batches there")
        return UnevenInputs(engines, communicators).joined(where, throws=throw_on_early_termination)

    def refuse_another(self, model: nn.Module, *, is_auto: bool, is_driven: bool) -> None:
        """Raise ``ConfigError`` for a further model, or a repeated call, that this job does not support."""
        if not self.engines:
            return
        if is_driven:
            hint = "profile or tune a script that trains one model, and makes it distributed once"
            raise ConfigError("is called again, and a profile or a tuning follows one model", MODEL, type(model).__name__, hint)
        if self.of(model) is not None:
            return
        if is_auto:
            hint = "load the strategy that all of them share: DistributedStrategy.load(FILE)"
            raise ConfigError("is looked up for one model, and this process trains several", "strategy.auto", "true", hint)
        if self.engines[0].executor.combination.adaptive is not None:
            hint = "use fixed local steps: localsgd with k_steps, or train one model"
            raise ConfigError("follows one reported loss, and this process trains several models", "strategy.adaptive_localsgd", hint=hint)
        for engine in self.engines:
            _refuse_shared(engine.model, model)


def _refuse_shared(known: nn.Module, model: nn.Module) -> None:
    """Raise ``ConfigError`` if the new model trains a parameter of the known one."""
    names = {id(parameter): (name, parameter) for name, parameter in known.named_parameters()}
    shared = [(name, names[id(own)][0]) for name, own in model.named_parameters() if id(own) in names and own.requires_grad]
    if shared:
        what = "has a parameter of another distributed model, of which it is a part, or which is a part of it: both would average it"
        hint = (
            "distribute only the parts, or only the whole, which the loop then calls; if the new model replaces an old one, `del` "
            "the old one's optimizer and last loss, too"
        )
        raise ConfigError(what, MODEL, f"{shared[0][0]}, there {shared[0][1]}", hint)
