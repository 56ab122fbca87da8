"""Outside changes: a script's writes to parameters outside of optimizer steps, such as loading weights.

Trainers that update alone measure their progress from values that all agreed on (Theta). Weights that are loaded,
copied or drawn anew become these values. Otherwise an averaging would take them for progress, and an outer optimizer
would step along them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from fleetbench.errors import ConfigError
from real.communication.lanes import host_reads
from real.engine.executor import Executor
from real.engine.gradients import COUNT

OUTSIDE = "parameters changed outside of optimizer.step()"
ALIKE = (
    "change them alike on every rank, after fleet.synchronize(); what belongs to an update goes into optimizer.step(), "
    "or into a hook of it that is registered before fleet.distributed_optimizer"
)
_SAMPLE = 32
"""Number of values compared in the middle of each parameter, because torch does not count writes by ``.data``."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
Owners = tuple[list[dict[str, nn.Parameter | None]], list[int]]
"""Each module's table of parameters by name, and the parameters' ids in this order."""


class OutsideChanges:
    """Finds outside changes between local steps: ``note`` follows fleet's writes, ``take_over`` precedes each step.

    A change is a new storage, an in-place write that torch counts, or a sample with other values. If trainers have
    agreed, a write that leaves a parameter's values the same is not a change.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, reads: bool) -> None:
        """``reads``: whether the host reads the sample in every step, because it does not wait for a device."""
        self._parameters = parameters
        self._reads = reads
        self._held: dict[str, torch.Tensor] = {}
        """Each parameter's storage, kept so that no other tensor gets its address."""
        self._samples: dict[str, torch.Tensor] = {}
        self._of_own: set[str] = set()
        """Names of parameters that this rank changed within a round; all ranks must have changed them when the next
        begins."""
        self._places: list[int] = []
        """Address of each parameter at the last ``note``."""
        self._writes: list[int] = []
        """Number of in-place writes to each parameter at the last ``note``."""
        self.note()

    @torch.no_grad()
    def note(self) -> None:
        """Note the parameters as they are; later writes are outside changes."""
        places, self._writes = self._marks()
        if places != self._places:
            for name in self._parameters:
                self._hold(name)
        self._places = places
        self._sample = torch.cat([*self._samples.values()])

    @torch.no_grad()
    def take_over(self, executor: Executor, agree: Callable[[Sequence[str]], None], *, agreed: bool, looks: bool) -> None:
        """Make changed parameters the base of the round; ``agree`` raises unless all trainers give the same lines.

        ``agreed``: whether trainers hold the same parameters, apart from the change. Within a round of plain
        averaging, a change is the trainer's own, as its updates are, unless workers have several trainers; after the
        averaging, all trainers must turn out to have made it. ``looks``: whether to read the sample even if the host
        has to wait for the device.

        Raises ``ConfigError`` for a new memory format, and for a fragment whose exchange is in flight.
        """
        places, writes = self._marks()
        touched = []
        if places != self._places or writes != self._writes:
            marks = zip(self._parameters, places, self._places, writes, self._writes, strict=True)
            touched = [name for name, place, was_at, count, was in marks if (place, count) != (was_at, was)]
        for name in touched:
            refuse_format(name, self._held[name], self._parameters[name])
            self._hold(name)
        names = self._differing() if touched or self._reads or looks else set()
        if not (touched or names or self._of_own):
            return
        if agreed:
            origin = executor.storage.snapshot()
            names = {name for name in (*touched, *names) if not self._is(name, origin[name])} | self._of_own
        elif not executor.steps_outside and executor.combination.worker_trainers == 1:
            self._of_own |= names
            names = set()
        if names:
            refuse_flying(names, executor)
            changed = {name: own.detach() for name, own in self._parameters.items() if name in names}
            with host_reads():
                agree([f"{name} of checksum {_checksum(value):x}" for name, value in changed.items()])
            executor.storage.rebase(changed)
            self._of_own.clear()
        self.note()

    def _marks(self) -> tuple[list[int], list[int]]:
        """Return each parameter's address, and its number of in-place writes."""
        own = self._parameters.values()
        return [*map(torch.Tensor.data_ptr, own)], [*map(COUNT, own)]  # without a Python loop, which is slow for many small parameters

    def _hold(self, name: str) -> None:
        self._held[name] = self._parameters[name].detach()
        self._samples[name] = _sample_of(self._held[name])

    def _is(self, name: str, kept: torch.Tensor) -> bool:
        with host_reads():
            return torch.equal(self._held[name], kept.to(self._held[name].device))

    def _differing(self) -> set[str]:
        """Return the names of parameters whose sample has other values than noted."""
        found = torch.cat([*self._samples.values()])
        if self._is_same(found, self._sample):
            return set()
        sizes = [len(sample) for sample in self._samples.values()]
        pairs = zip(self._samples, found.split(sizes), self._sample.split(sizes), strict=True)
        return {name for name, one, other in pairs if not self._is_same(one, other)}

    @staticmethod
    def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
        with host_reads():
            return torch.equal(one.view(torch.uint8), other.view(torch.uint8))  # as bits: NaNs equal themselves


def refuse_format(name: str, before: torch.Tensor, now: torch.Tensor) -> None:
    """Raise ``ConfigError`` if a parameter's shape, strides or type are not those that its buffers were made for."""
    if (before.shape, before.stride(), before.dtype) != (now.shape, now.stride(), now.dtype):
        what = "has another shape, type or memory format than when the model was distributed"
        shown = f"{list(now.shape)} with strides {list(now.stride())}, before {list(before.shape)} with strides {list(before.stride())}"
        raise ConfigError(what, f"parameter {name}", shown, "convert the model before fleet.distributed_model")


def refuse_flying(names: Iterable[str], executor: Executor) -> None:
    """Raise ``ConfigError`` for parameters that change while distances of their old values are in flight."""
    flying = [name for name in names if name in executor.in_flight]
    if flying:
        what = "changes outside of optimizer.step() while the exchange of its fragment is under way"
        raise ConfigError(what, f"parameter {flying[0]}", hint="call fleet.synchronize() on every trainer before the change")


def owners_of(model: nn.Module) -> Owners:
    """Return the current owners of the model's parameters."""
    found = (module._parameters for module in model.modules())  # noqa: SLF001  # ``named_parameters`` takes thirty times as long
    tables = [table for table in found if isinstance(table, dict) and table]
    return tables, _ids(tables)


def _ids(tables: Sequence[dict[str, nn.Parameter | None]]) -> list[int]:
    return [*map(id, chain.from_iterable(map(dict.values, tables)))]


def refuse_replaced(owners: Owners, parameters: Mapping[str, nn.Parameter], model: nn.Module) -> Owners:
    """Return the parameters' owners. Raises ``ConfigError`` for a replaced parameter: nothing trains the new one."""
    if _ids(owners[0]) == owners[1]:
        return owners
    there = {id(parameter) for parameter in model.parameters()}
    gone = [name for name, parameter in parameters.items() if id(parameter) not in there]
    if gone:
        what = "was replaced after fleet.distributed_model, and neither fleet nor the optimizer knows the new one"
        hint = "load with load_state_dict(..., assign=False), or call fleet.distributed_model(model) again, between two steps"
        raise ConfigError(what, f"parameter {gone[0]}", f"{len(gone)} of {len(parameters)}", hint)
    return owners_of(model)


def refuse_renamed(parameters: Mapping[str, nn.Parameter], model: nn.Module, where: str) -> None:
    """Raise ``ConfigError`` for a parameter with a new name, because ``where`` saves and loads by name."""
    now = {id(own): name for name, own in model.named_parameters()}
    renamed = [(name, now[id(own)]) for name, own in parameters.items() if now.get(id(own), name) != name]
    if renamed:
        what = "has another name than when the model was distributed, and is saved and loaded by name"
        hint = "prune, or undo it, before fleet.distributed_model; torch.save takes this model as it is, after fleet.synchronize()"
        raise ConfigError(what, f"{where}: parameter {renamed[0][0]}", f"now {renamed[0][1]}", hint)


def _sample_of(value: torch.Tensor) -> torch.Tensor:
    """Return a view of values in the middle of a tensor, consecutive in memory."""
    number = min(_SAMPLE, value.numel())
    return value.as_strided((number,), (1,), value.storage_offset() + (value.numel() - number) // 2)


def _checksum(value: torch.Tensor) -> int:
    """Return a sum of the values' bits, which is the same for any order of summation."""
    flat = value.reshape(-1)
    return int(flat.view(_BITS.get(flat.element_size(), torch.int64)).sum(dtype=torch.int64))
