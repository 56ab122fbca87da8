"""DistributedDataParallel: a subclass of torch's, in which a job can replace the Reducer by ``real.engine``."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar, cast
from weakref import ref

import torch
from torch._C._dynamo.eval_frame import set_eval_frame  # by which dynamo sets its compiler
from torch.nn.parallel import distributed

from fleetbench.errors import ConfigError
from real.attach.job import Job

_Ddp = distributed.DistributedDataParallel
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _eager(function: _Function) -> _Function:
    """Exclude a method from compilation, as torch does with its own; its callees may be compiled."""
    return cast("_Function", torch._disable_dynamo(function, recursive=False))  # type: ignore[attr-defined]  # noqa: SLF001  # as torch's own


class DistributedDataParallel(_Ddp):
    """Torch's DDP, which a job may attach to a strategy's engine.

    Life cycle: torch's behaviour, bit for bit -> ``is_attached``: the job's engine exchanges the gradients,
    and this class exchanges nothing. The engine hooks this module, not the inner one: calls of the inner
    module outside of this one's forward are no steps, as in torch. As in torch, a backward exchanges if its
    forward ran outside of ``no_sync``. Copies, and models loaded from a file, have torch's behaviour again.
    """

    job: ClassVar[Job | None] = None
    """Job of this process; ``None`` until this class has replaced torch's."""
    is_attached = False

    @_eager
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the forward as in torch; a job attaches before the first forward with gradients."""
        if self.job is None:
            return super().__call__(*inputs, **named)
        # `torch.compile(ddp)` compiles only the inner module, see ``_run_ddp_forward``
        compiles = set_eval_frame(None)
        mode, has_gradients = self.training, torch.is_grad_enabled()
        try:
            if has_gradients:
                self.job.before_forward(self)
            if self.is_attached:  # as in torch, a forward with gradients is training in any mode
                self.__dict__.update(compiles=compiles, training=mode or has_gradients)
            else:
                set_eval_frame(compiles)
            return super().__call__(*inputs, **named)
        finally:
            self.__dict__["training"] = mode
            self.__dict__.pop("compiles", None)
            set_eval_frame(compiles)

    @property
    def exchanges_nothing(self) -> bool:
        """Whether the model is attached, or will be at its first forward with gradients."""
        return self.is_attached or (self.job is not None and self.job.attached is not None)

    def switch_off(self) -> None:
        """Remove the Reducer, so that this class exchanges nothing from now on."""
        logged = self._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # torch's
        self.reducer._remove_autograd_hooks()  # noqa: SLF001  # torch has no public name for it
        self.__dict__.update(reducer=_NoReducer(ref(self)), logger=_Logged(logged, {}), is_attached=True)

    def join(self, *arguments: Any, **named: Any) -> AbstractContextManager[None]:
        """Return torch's ``join``, or that of the job's engine: trainers may have different numbers of batches."""
        if self.job is not None:
            self.job.before_forward(self)
        if not self.is_attached:
            own: AbstractContextManager[None] = super().join(*arguments, **named)
            return own
        assert self.job is not None
        assert self.job.attached is not None
        return self.job.attached.join(self, *arguments, **named)

    def join_hook(self, **named: Any) -> Any:
        """Return torch's hook for ``Join``.

        Raises ``ConfigError`` while a job is attached, because it cannot join several objects.
        """
        if self.is_attached:
            raise ConfigError("joins uneven inputs of several objects at once", "Join", hint="use `with ddp.join():` for only the model")
        return super().join_hook(**named)  # type: ignore[no-untyped-call]  # torch's

    def register_comm_hook(self, state: object, hook: Any) -> None:
        """Register a hook as in torch. Raises ``ConfigError`` after the first forward with an attached job."""
        if self.is_attached:
            what = "comes after the first forward, when a strategy has replaced the exchange"
            raise ConfigError(what, "register_comm_hook", hint="register it before the first forward")
        super().register_comm_hook(state, hook)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]  # torch's
        state.pop("is_attached", None)
        return state

    def hear_backward(self) -> None:
        """Expect a backward inside the current forward, as in Lightning's manual optimization."""
        assert self.job is not None
        assert self.job.attached is not None
        self.job.attached.hear_backward(self)

    @_eager
    def _pre_forward(self, *inputs: Any, **named: Any) -> Any:
        if not self.is_attached:
            return super()._pre_forward(*inputs, **named)  # type: ignore[no-untyped-call]  # torch's
        flags = {name: self.__dict__[name] for name in ("require_backward_grad_sync", "require_forward_param_sync")}
        self.__dict__.update(dict.fromkeys(flags, False))
        try:  # the rest moves the inputs to the device
            return super()._pre_forward(*inputs, **named)  # type: ignore[no-untyped-call]  # torch's
        finally:
            self.__dict__.update(flags)

    @_eager
    def _run_ddp_forward(self, *inputs: Any, **named: Any) -> Any:
        if "compiles" not in self.__dict__:
            return super()._run_ddp_forward(*inputs, **named)  # type: ignore[no-untyped-call]  # torch's
        before = set_eval_frame(self.__dict__.pop("compiles"))
        try:
            return super()._run_ddp_forward(*inputs, **named)  # type: ignore[no-untyped-call]  # torch's
        finally:
            set_eval_frame(before)

    @_eager
    def _post_forward(self, output: Any) -> Any:
        return output if self.is_attached else super()._post_forward(output)  # type: ignore[no-untyped-call]  # torch's


class _Logged(NamedTuple):
    """Data of a Reducer's logger at the time of the switch-off; Lightning asks for it at the end."""

    strs_map: dict[str, Any]
    ints_map: dict[str, Any]

    def _get_ddp_logging_data(self) -> "_Logged":
        return self


class _NoReducer(NamedTuple):
    """Replaces the Reducer of an attached model; it has nothing to prepare."""

    model: "ref[DistributedDataParallel]"

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_forward(self) -> None:
        """Do nothing."""

    def prepare_for_backward(self, _tensors: Any) -> None:
        """Expect a backward: the wrapper never calls this, but Lightning does in manual optimization."""
        if (model := self.model()) is not None:
            model.hear_backward()


DistributedDataParallel.__module__, DistributedDataParallel.__qualname__ = _Ddp.__module__, _Ddp.__qualname__
DistributedDataParallel.__doc__ = _Ddp.__doc__


def replace(module: ModuleType, job: Job) -> None:
    """Replace torch's class in ``module``, and in ``torch.nn.parallel`` if that has imported it already."""
    DistributedDataParallel.job = job
    for each in (module, sys.modules.get("torch.nn.parallel")):
        if hasattr(each, "DistributedDataParallel"):
            each.DistributedDataParallel = DistributedDataParallel  # type: ignore[union-attr]  # it has one
