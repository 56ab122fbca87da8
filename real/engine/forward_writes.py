"""Forward writes: what training forwards write into a model, and that ranks do not part by it.

DistributedDataParallel sends rank 0's buffers before every forward. An engine sends none, so a buffer that a forward writes has to
be the same on every rank by itself, as spectral norms are; batch-norm statistics, which no training forward reads, may differ.
Life of a look: ``begin`` (the step's first forward) -> ``forward_ends`` -> ``compare`` (the gradients were exchanged).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from fleetbench.errors import ConfigError
from real.communication.communicators import Communicators
from real.communication.lanes import host_reads

_OWN = ("running_mean", "running_var", "num_batches_tracked")
_OFTEN = 64
"""From this update on trainers look for writes that begin late."""


class ForwardWrites:
    """Compares buffers before updates 1, 2, 3, 5, 9, ..., where forwards write any, and parameters that forwards write.

    Two numbers stand for a tensor. Numbers that differ by rounding, as on unlike processors, are the same.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], communicators: Communicators) -> None:
        self._model = model
        self._parameters = parameters
        self._communicators = communicators
        norms = [(prefix, module) for prefix, module in model.named_modules() if isinstance(module, _NormBase)]
        own = {f"{prefix}.{name}".lstrip(".") for prefix, _ in norms for name in _OWN}
        self._names = [name for name, _ in model.named_buffers() if name not in own]
        self._writes_buffers = False
        self._versions: list[int] = []
        self._numbers: torch.Tensor | None = None
        """Of the buffers, as the look began; none where there is no look."""
        self._written = torch.empty(0, device="cpu")

    def begin(self, updates: int) -> None:
        """A step's first forward begins, after so many updates."""
        if self._communicators.trainers == 1 or updates.bit_count() > 1 or (0 < updates < _OFTEN and not self._writes_buffers):
            return
        self._versions = [parameter._version for parameter in self._parameters.values()]  # noqa: SLF001  # torch documents it
        self._numbers = self._numbers_now()
        self._written = torch.zeros(len(self._parameters) + len(self._names), dtype=torch.float64, device="cpu")

    def forward_ends(self) -> None:
        """A forward has ended: note what it wrote."""
        if self._numbers is None:
            return
        changed = [parameter._version != before for parameter, before in zip(self._parameters.values(), self._versions, strict=True)]  # noqa: SLF001  # see above
        with host_reads():
            moved = (self._numbers_now() != self._numbers).any(1).tolist()
        self._written += torch.tensor([*changed, *moved], dtype=torch.float64, device="cpu")

    def compare(self) -> None:
        """Every rank calls it after the same exchange. Raises ``ConfigError``, on all of them, for what differs by rank."""
        if self._numbers is not None:
            numbers, self._numbers = self._numbers, None
            with host_reads():
                self._compare(numbers)

    def _compare(self, numbers: torch.Tensor) -> None:
        first = len(self._parameters)
        told = self._gathered(torch.cat([self._written, numbers.cpu().reshape(-1)]))
        self._writes_buffers = bool(told[:, first : len(self._written)].any())
        names = _apart(told[:, len(self._written) :], self._names, [dict(self._model.named_buffers()).get(name) for name in self._names])
        if names:
            what = "is written by the training forward and differs by rank; fleet does not send rank 0's before every forward, as DDP does"
            hint = "call torch.distributed.broadcast(buffer, 0) before each forward, or compute it from the batches of all ranks"
            raise ConfigError(what, f"buffer {', '.join(names[:5])}", f"{len(names)} of {len(self._names)}", hint)
        written = [name for name, flag in zip(self._parameters, told[:, :first].any(0).tolist(), strict=True) if flag]
        found = [self._parameters[name].detach() for name in written]
        if names := _apart(self._gathered(_numbers(found).cpu().reshape(-1)), written, found) if written else []:
            what = "is written by the training forward, and by each rank in another way, so that trainers part"
            hint = "initialise parameters before fleet.distributed_model, and change them between steps, alike on every rank"
            raise ConfigError(what, f"parameter {', '.join(names[:5])}", f"{len(names)} of {first}", hint)

    def _numbers_now(self) -> torch.Tensor:
        buffers = dict(self._model.named_buffers())  # a module may put others in their place
        return _numbers([buffers.get(name) for name in self._names])

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        """All ranks' numbers, a row a rank."""
        trainers, device = self._communicators.trainers, self._communicators.device
        whole = own.repeat(trainers).to(device)
        if own.numel():
            self._communicators.all_gather(whole, own.to(device), "world", 0)
        with host_reads():
            return whole.cpu().reshape(trainers, -1)


@torch.no_grad()
def _numbers(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """``(tensors, 2)``: of each, the norm and a weighted sum, which the order of elements changes; zeros for none."""
    found = []
    for tensor in tensors:
        whole = (
            torch.zeros(0, device="cpu") if tensor is None else torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        )
        flat = whole.detach().reshape(-1).double().nan_to_num()
        weights = torch.linspace(1, 2, flat.numel(), dtype=torch.float64, device=flat.device)
        found.append(torch.stack([torch.linalg.vector_norm(flat), flat @ weights]))
    return torch.stack(found) if found else torch.empty(0, 2, dtype=torch.float64, device="cpu")


def _apart(told: torch.Tensor, names: Sequence[str], tensors: Sequence[torch.Tensor | None]) -> list[str]:
    """Names of the tensors whose numbers differ from rank 0's by more than rounding; ``told`` has a row a rank, two numbers a tensor."""
    numbers = told.reshape(len(told), -1, 2)
    difference = (numbers - numbers[0]).abs().amax((0, 2))
    size = numbers[:, :, 0].amax(0)
    finest = [torch.finfo(each.dtype).eps if each is not None and each.dtype.is_floating_point else 0.0 for each in tensors]
    limits = [max(64 * eps, 1e-6) * float(norm) for eps, norm in zip(finest, size, strict=True)]
    return [name for name, found, limit in zip(names, difference.tolist(), limits, strict=True) if found > limit]
