"""The arms: ways to train the same model on the same batches, each one ``step`` and nothing more.

An arm is built on every rank at the same place, steps, finishes (so that all ranks agree), and closes.
What a user of the library would not write is in no arm: each is the loop of its own documentation.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from loop import Arm, Plain, SkippedArm
from timing import UNIT_STEPS
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torchft_arm import Torchft, TorchftBare
from workloads import sgd

from fleetbench.errors import ConfigError
from fleetbench.plan.replay import Decider
from fleetbench.plan.training import PLANNED
from fleetbench.strategy import DistributedStrategy
from fleetbench.support import refuse_unexecuted
from real.communication.communicators import Communicators
from real.engine.engine import Engine

K = UNIT_STEPS


class Ours:
    """fleetbench's engine. All contact with it is in this class."""

    def __init__(self, model: nn.Module, strategy: DistributedStrategy, communicators: Communicators) -> None:
        try:
            refuse_unexecuted(strategy, "strategy", PLANNED, "the real executor")
            self._engine = Engine(model, strategy, communicators, keep_times=False)
        except ConfigError as error:
            raise SkippedArm(str(error).splitlines()[0]) from error
        self._loop = Plain(model, sgd(model))
        self._engine.attach_optimizer(self._loop.optimizer)
        self.step = self._loop.step

    @property
    def bucket_bytes(self) -> list[int]:
        """Sizes of the plan's buckets."""
        return [bucket.nbytes for bucket in self._engine.plan.buckets]

    def finish(self) -> None:
        """See ``Arm``."""
        self._engine.flush(end=True)

    def close(self) -> None:
        """See ``Arm``."""
        self._engine.close()

    @staticmethod
    @contextlib.contextmanager
    def clocked_plan(add_ns: Callable[[int], None]) -> Any:
        """Hand the time of every call into the plan to ``add_ns``; the clock's own cost counts as the plan's."""
        original = Decider.on

        def clocked(self: Decider, *arguments: Any) -> Any:
            begin = time.perf_counter_ns()
            operations = original(self, *arguments)
            add_ns(time.perf_counter_ns() - begin)
            return operations

        Decider.on = clocked  # type: ignore[method-assign]
        try:
            yield
        finally:
            Decider.on = original  # type: ignore[method-assign]


@dataclass(frozen=True, slots=True, kw_only=True)
class DdpOptions:
    """The settings of DDP that are searched."""

    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    batched_grad_copy: bool = False
    forward_sync_buffers: bool | None = None
    """False: batch-norm statistics stay local, as ours do; none: DDP's default, a broadcast at every forward."""
    keep_gradients: bool = False
    """``zero_grad(set_to_none=False)``, the caller's part: gradients accumulate in the bucket itself."""

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        """DDP around ``model``."""
        return DistributedDataParallel(
            model,
            bucket_cap_mb=self.bucket_cap_mb,  # type: ignore[arg-type]  # fractions of a MiB are taken, and matter for small models
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            batched_grad_copy=self.batched_grad_copy,
            forward_sync_buffers=self.forward_sync_buffers,
        )


def ddp(model: nn.Module, options: DdpOptions, *, fused: bool = False) -> Plain:
    """DistributedDataParallel."""
    return Plain(options.wrap(model), sgd(model, fused=fused), set_to_none=not options.keep_gradients)


def ddp_rounded(model: nn.Module) -> Plain:
    """DDP from a start that is another by one rounding: how far float32 alone drives two equal trainings apart."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps * torch.randn(parameter.shape, generator=generator))
    return ddp(model, DdpOptions())


class NoSync(Plain):
    """DDP's own gradient merge: ``no_sync`` for all micro-batches of an update but the last."""

    def __init__(self, model: nn.Module, options: DdpOptions, *, fused: bool = False) -> None:
        super().__init__(options.wrap(model), sgd(model, fused=fused), not options.keep_gradients)
        self._micro_batch = 0

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """See ``Arm``."""
        self._micro_batch += 1
        last = self._micro_batch % K == 0
        assert isinstance(self.model, DistributedDataParallel)
        with contextlib.nullcontext() if last else self.model.no_sync():
            (cross_entropy(self.model(inputs), labels) / K).backward()
        if last:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.set_to_none)


def post_local(model: nn.Module, *, wrapped: bool, fused: bool = False) -> Plain:
    """PostLocalSGDOptimizer of torch, averaging behind the steps 1, 5, 9, ....

    ``wrapped``: in DDP with the hook, as torch documents it, without any all-reduce of gradients.
    Otherwise around the bare model, which torch's documentation does not show and which costs less.
    """
    trained = model
    if wrapped:
        trained = DistributedDataParallel(model)
        state = PostLocalSGDState(None, None, start_localSGD_iter=0, post_local_gradient_allreduce=False)
        trained.register_comm_hook(state, post_localSGD_hook)
    return Plain(trained, PostLocalSGDOptimizer(sgd(model, fused=fused), PeriodicModelAverager(period=K, warmup_steps=0)))


class WrittenOut(Plain):
    """Local SGD in plain torch, averaging behind the steps 4, 8, ...: what torchft's must equal. Never timed."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, sgd(model))
        self._done = 0

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        """See ``Arm``."""
        super().step(inputs, labels)
        self._done += 1
        if self._done % K == 0:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.data, op=dist.ReduceOp.AVG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An arm in the table: how it is built, and which arm's parameters it must end with."""

    build: Callable[[nn.Module, Context], Arm]
    equals: str | None = None
    """The arm with the same algorithm; none: nothing to compare with."""
    extra_steps: int = 0
    """Steps behind the timed ones, so that the last step averages."""
    timed: bool = True


@dataclass(frozen=True, slots=True)
class Context:
    """What the arms of one launch share."""

    communicators: Communicators
    tuned: DdpOptions = field(default_factory=DdpOptions)
    """DDP's fastest settings."""
    ours: Mapping[str, Any] = field(default_factory=dict)
    """Our fastest bucket size."""


def ours(changes: Mapping[str, Any], *, tuned: bool = False) -> Callable[[nn.Module, Context], Arm]:
    """Our engine with ``changes`` to Fleet's defaults; ``tuned``: and with the bucket size that the search found."""

    def build(model: nn.Module, context: Context) -> Arm:
        fields = {**changes, **context.ours} if tuned else dict(changes)
        return Ours(model, DistributedStrategy.from_dict(fields), context.communicators)

    return build


def _without_static_graph(options: DdpOptions) -> DdpOptions:
    """A static graph assumes that every backward exchanges."""
    return DdpOptions(**{name: getattr(options, name) for name in DdpOptions.__slots__ if name != "static_graph"})


FUSED = {"build_strategy": {"fuse_all_optimizer_ops": True}}


def bucket_size(mib: float) -> dict[str, Any]:
    """Buckets of so many MiB, however many gradients that is; 0: one bucket."""
    return {"fuse_grad_size_in_MB": mib} | ({"fuse_grad_count": 0} if mib else {})


ONE_BUCKET = bucket_size(0.0)
LOCAL = ONE_BUCKET | {"localsgd": True, "localsgd_configs": {"k_steps": K, "begin_step": 1}}
MERGE = ONE_BUCKET | {"gradient_merge": True, "gradient_merge_configs": {"k_steps": K, "avg": True}}

ARMS: dict[str, Entry] = {
    "none": Entry(build=lambda model, _: Plain(model, sgd(model))),
    "ddp": Entry(build=lambda model, _: ddp(model, DdpOptions())),
    "ddp_tuned": Entry(build=lambda model, context: ddp(model, context.tuned), equals="ddp"),
    "ddp_tuned_fused": Entry(build=lambda model, context: ddp(model, context.tuned, fused=True), equals="ddp"),
    "ddp_views": Entry(build=lambda model, _: ddp(model, DdpOptions(gradient_as_bucket_view=True)), equals="ddp", timed=False),
    "ddp_rounded": Entry(build=lambda model, _: ddp_rounded(model), equals="ddp", timed=False),
    "ddp_small": Entry(build=lambda model, _: ddp(model, DdpOptions(bucket_cap_mb=0.25)), equals="ddp", timed=False),
    "ours": Entry(build=ours(ONE_BUCKET), equals="ddp"),
    "ours_fused": Entry(build=ours(ONE_BUCKET | FUSED), equals="ddp"),
    "ours_tuned": Entry(build=ours({}, tuned=True), equals="ddp"),
    "ours_tuned_fused": Entry(build=ours(FUSED, tuned=True), equals="ddp"),
    "ours_fleet": Entry(build=ours({}), equals="ddp"),
    "post_local": Entry(build=lambda model, _: post_local(model, wrapped=True), extra_steps=1),
    "post_local_bare": Entry(build=lambda model, _: post_local(model, wrapped=False), equals="post_local", extra_steps=1),
    "post_local_bare_fused": Entry(build=lambda model, _: post_local(model, wrapped=False, fused=True), equals="post_local", extra_steps=1),
    "ours_local": Entry(build=ours(LOCAL), equals="post_local", extra_steps=1),
    "ours_local_fused": Entry(build=ours(LOCAL | FUSED), equals="post_local", extra_steps=1),
    "torchft": Entry(build=lambda model, _: Torchft(model), equals="written_out"),
    "torchft_bare": Entry(build=lambda model, _: TorchftBare(model), equals="written_out"),
    "written_out": Entry(build=lambda model, _: WrittenOut(model), timed=False),
    "no_sync": Entry(build=lambda model, _: NoSync(model, DdpOptions())),
    "no_sync_tuned": Entry(build=lambda model, context: NoSync(model, _without_static_graph(context.tuned)), equals="no_sync"),
    "ours_merge": Entry(build=ours(MERGE), equals="no_sync"),
    "ours_merge_fused": Entry(build=ours(MERGE | FUSED), equals="no_sync"),
}
TIMED = tuple(name for name, entry in ARMS.items() if entry.timed)
