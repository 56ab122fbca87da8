"""Updates: follows the steps of a model's optimizers since the last backward."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fleetbench.errors import ConfigError
from fleetbench.plan.combination import Combination
from real.compute.living import weakly
from real.engine.executor import Executor
from real.engine.gradients import Averaged
from real.engine.phase import Phase
from real.engine.refusals import (
    fields_of,
    given_of,
    refuse_arguments,
    refuse_other_optimizer,
    refuse_scaler,
    refuse_update,
)
from real.engine.stopwatch import Stopwatch


class Updates:
    """Follows the steps of one model's optimizers, and reports them to the executor.

    An update waits from a backward's end until the first optimizer steps, has begun until each has stepped once, and is
    over then. If gradients are averages, an update is whatever the loop does with them until its next forward, by some
    of the optimizers or by hand. A step nested in a step of the same optimizer, as when a subclass calls its base's,
    does not count. A step that raises ends there.

    Raises ``ConfigError`` for a step that would differ from DistributedDataParallel's, or is not the strategy's update.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        stopwatch: Stopwatch,
        executor: Callable[[], Executor],
        phase: Callable[[], Phase],
        rests: Callable[[Optimizer], bool],
        ends: Callable[[], None],
    ) -> None:
        """Follow no optimizer yet.

        ``executor`` and ``phase`` return the engine's current ones. ``rests`` returns whether an optimizer's step
        does not concern this model. ``ends`` is called when an update is over.
        """
        self.optimizers: list[Optimizer] = []
        self._model, self._parameters = model, parameters
        self._members = list(parameters.values())
        self._stopwatch, self._executor, self._phase = stopwatch, executor, phase
        self._rests, self._ends = rests, ends
        self._has_begun = False
        """Whether an optimizer has stepped since the last backward."""
        self._stepped: list[Optimizer] = []
        """The attached optimizers that have stepped since the last backward."""
        self._averaged = Averaged()
        self._running: dict[int, FrameType] = {}
        """Frame of torch's function around each step that is running or has raised, by the optimizer's id."""
        self._num_steps = 0
        self._others: dict[int, int] = {}
        """Number of attached optimizers' steps before each running step of another optimizer, by that one's id."""
        self._handles: list[RemovableHandle] = []

    def hear_others(self) -> list[RemovableHandle]:
        """Follow steps of optimizers that fleet was not given, until the returned handles are removed."""
        return [
            register_optimizer_step_pre_hook(weakly(self._any_begins)),
            register_optimizer_step_post_hook(weakly(self._any_ends)),
        ]

    def joined_by(self, optimizer: Optimizer) -> list[Optimizer]:
        """Return the optimizers including this one, which replaces those that hold some of its parameters."""
        held = {*map(id, parameters_of([optimizer]))}
        stay = [one for one in self.optimizers if held.isdisjoint(map(id, parameters_of([one]))) and one is not optimizer]
        place = next((number for number, one in enumerate(self.optimizers) if one not in stay), len(stay))
        return [*stay[:place], optimizer, *stay[place:]]

    def hear(self, optimizers: Sequence[Optimizer]) -> None:
        """Follow the steps of these optimizers from now on, and of no others."""
        for handle in self._handles:
            handle.remove()
        self.optimizers = list(optimizers)
        self._handles = [one.register_step_pre_hook(self._step_begins) for one in optimizers]
        self._handles += [one.register_step_post_hook(self._step_ends) for one in optimizers]

    @property
    def has_begun(self) -> bool:
        """Whether an update has begun and is not over."""
        return self._has_begun

    def begin(self) -> None:
        """Begin a step, in which no optimizer has stepped yet."""
        self._has_begun = False
        self._stepped.clear()

    def over(self) -> None:
        """End an update; steps without a new backward may use its gradients again."""
        self.begin()
        if self._what.leaves_averages:
            self._averaged.note(self._members)

    def end_open(self) -> None:
        """End an update in which only some optimizers have stepped, because what follows does not belong to it."""
        if self._phase() != Phase.UPDATE:
            return
        if not self._what.leaves_averages:
            self.refuse_partial()
        elif self._has_begun or not self.optimizers:
            running = [one for one in self.optimizers if self._is_running(one)]  # a closure of theirs has called this
            for one in running:
                self._executor().end_update(one)
            self._update_begins()
            self._ends()
            for one in running:
                self._executor().begin_update(one)

    def refuse_partial(self, again: Optimizer | None = None) -> None:
        """Raise ``ConfigError`` if only some optimizers have stepped, but all must.

        With ``again``, raise it only if that optimizer is one of those that have stepped.
        """
        if not self._stepped or self._what.leaves_averages or not (again is None or _is_in(again, self._stepped)):
            return
        number, one = next((number, one) for number, one in enumerate(self.optimizers, 1) if not _is_in(one, self._stepped))
        why = f"has not stepped, but another has, and with {fields_of(self._what)} all step once in every step"
        where = f"optimizer {type(one).__name__}, number {number} of {len(self.optimizers)} given to fleet"
        hint = "step every optimizer once after each step's last backward; any of them may step where the strategy has none of these fields"
        raise ConfigError(why, where, hint=hint)

    @property
    def _what(self) -> Combination:
        return self._executor().combination

    def _step_begins(self, optimizer: Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        frame, given = _caller(), given_of(arguments, named)
        if self._is_running(optimizer) or (not any(map(callable, given)) and self._rests(optimizer)):
            return
        self._running[id(optimizer)] = frame
        self._num_steps += 1
        refuse_arguments(given, self._what)
        if not any(map(callable, given)):
            self._refuse_unready()
        refuse_scaler(self._what)
        if self._phase() == Phase.UPDATE:
            self.refuse_partial(again=optimizer)
            self._update_begins()
        if self._phase() == Phase.UPDATE or self._what.leaves_averages:
            self._executor().begin_update(optimizer)

    def _step_ends(self, optimizer: Optimizer, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
        if self._running.get(id(optimizer)) is not _caller():
            return
        del self._running[id(optimizer)]
        self._executor().end_update(optimizer)
        if any(map(callable, given_of(arguments, named))):  # a closure has run the backward
            self._refuse_unready()
        if self._phase() != Phase.UPDATE:
            return
        self._update_begins()
        if not _is_in(optimizer, self._stepped):
            self._stepped.append(optimizer)
        if len(self._stepped) == len(self.optimizers):
            self._ends()

    def _refuse_unready(self) -> None:
        """Raise ``ConfigError`` unless ``.grad`` is ready for the strategy's update, or holds the last averages."""
        phase = self._phase()
        if phase != Phase.UPDATE and not (
            phase not in (Phase.KEPT, Phase.BACKWARD) and self._what.leaves_averages and self._averaged.has(self._members)
        ):
            refuse_update(phase, self._members, self._model)

    def _any_begins(self, optimizer: Optimizer, *_: Any) -> None:
        if not _is_in(optimizer, self.optimizers) and not any(map(self._is_running, self.optimizers)):
            self._others.setdefault(id(optimizer), self._num_steps)

    def _any_ends(self, optimizer: Optimizer, *_: Any) -> None:
        """Handle a step of an optimizer that fleet was not given, unless it only wraps an attached optimizer."""
        if self._others.pop(id(optimizer), None) != self._num_steps:
            return
        what = self._what
        is_averaged = self._phase() not in (Phase.KEPT, Phase.BACKWARD) and not (what.is_local or what.merges or what.scales)
        refuse_other_optimizer(optimizer, self._parameters, self._model, is_averaged=is_averaged)
        if what.leaves_averages and not {*map(id, parameters_of([optimizer]))}.isdisjoint(map(id, self._members)):
            self._update_begins()

    def _update_begins(self) -> None:
        if not self._has_begun:
            self._stopwatch.update_begins()
        self._has_begun = True

    def _is_running(self, optimizer: Optimizer) -> bool:
        """Whether a step of the optimizer is running; a step that has raised is not."""
        wanted = self._running.get(id(optimizer))
        frame = inspect.currentframe() if wanted is not None else None
        while frame is not None:
            if frame is wanted:
                return True
            frame = frame.f_back
        self._running.pop(id(optimizer), None)
        return False


def parameters_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return all parameters of the optimizers' groups."""
    return [parameter for one in optimizers for group in one.param_groups for parameter in group["params"]]


def _is_in(optimizer: Optimizer, optimizers: Iterable[Optimizer]) -> bool:
    return any(one is optimizer for one in optimizers)


def _caller() -> FrameType:
    """Return the frame that called this function's caller: torch's function around a step."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    assert frame.f_back.f_back is not None
    return frame.f_back.f_back
