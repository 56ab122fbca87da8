"""Events: what the main thread of a process does, recorded while it is observed.

Torch is unchanged before and after.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import dataloader

from fleetbench.why.observed import Loader
from fleetbench.why.shares import Kind
from real.sharding.waits import places, replaced

_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "monitored_barrier", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter",
)  # fmt: skip
"""Names of the functions of ``torch.distributed`` that a script may call directly."""
_SAMPLES_PER_S = 50.0
_MOST_BACKWARDS = 16
"""Number of latest backwards that are kept. A model's own must be among them at its next forward."""
_OURS = [Path(__file__).parents[2] / name for name in ("fleetbench", "real", "sim", "tuner")]
_BELOW = ("<", *(str(path) for path in (*_OURS, Path(torch.__file__).parent, Path(threading.__file__).parent)))
"""Beginnings of the paths of files of this project, of torch and of Python's library, and of code without a file."""
clock = time.time_ns
"""Clock of the events, which the Reducer's own times also use."""


class Events:
    """Records what the thread that creates it does inside the context ``on``."""

    def __init__(self) -> None:
        self.found: list[list[Any]] = []
        """Fields of each ``Event``, ordered by end."""
        self.samples: list[tuple[int, str]] = []
        self._loaders: dict[int, list[int]] = {}
        """For each DataLoader iterator by ``id()``: its number of workers, and the nanoseconds that this
        thread spent in it."""
        self._thread = threading.get_ident()
        self._backwards: deque[list[Any]] = deque(maxlen=_MOST_BACKWARDS)
        """Latest backwards, as entries of ``found``."""
        self._is_in_unit = False
        """Whether ``fully_shard`` is gathering or scattering."""
        self._begun: list[int] = []

    @property
    def loader(self) -> Loader | None:
        """DataLoader that took the most time; ``None`` if there was none."""
        if not self._loaders:
            return None
        return Loader(num_workers=max(self._loaders.values(), key=lambda each: each[1])[0])

    @contextmanager
    def on(self) -> Iterator[None]:
        """Record events inside the context."""
        with ExitStack() as stack:
            for owner, name, around in self._places():
                stack.enter_context(replaced(owner, name, around))
            stack.enter_context(self._sampling())
            yield

    @contextmanager
    def forward(self, model: nn.Module) -> Iterator[None]:
        """Record a model's forward; read from a DDP's Reducer when the previous backward had computed its gradients."""
        exchanges = torch.is_grad_enabled() and isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
        kind: Kind = "forward" if torch.is_grad_enabled() else "evaluate"
        with self._noting(kind):
            yield
        if exchanges:
            assert isinstance(model, DistributedDataParallel)
            logged = model._get_ddp_logging_data()  # noqa: SLF001  # torch has no public name for it
            computed_ns = int(logged.get("backward_compute_time_end", 0))  # of the exchange before this forward
            before = next((event for event in reversed(self._backwards) if event[1] < computed_ns < event[2]), None)
            if before is not None:
                before[3] = max(before[3], computed_ns)

    @contextmanager
    def evaluations(self, module: nn.Module) -> Iterator[None]:
        """Record the module's forwards without gradients, including those that bypass the script's DDP."""
        begun: list[int] = []

        def begins(*_: object) -> None:
            if not (torch.compiler.is_compiling() or torch.is_grad_enabled()):  # a compiled graph must not contain this
                begun.append(clock())

        def ends(*_: object) -> None:
            if not torch.compiler.is_compiling() and begun:
                self.found.append(["evaluate", begun.pop(), clock(), 0])

        handles = [module.register_forward_pre_hook(begins), module.register_forward_hook(ends, always_call=True)]
        yield
        for handle in handles:
            handle.remove()

    def optimizer_begins(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Record the start of an optimizer's step; return its arguments, with closures wrapped as part of the loop."""
        self._begun.append(clock())
        noted = [self._around("loop", each) if callable(each) else each for each in arguments[1:]]
        return (*arguments[:1], *noted), {name: self._around("loop", each) if callable(each) else each for name, each in named.items()}

    def optimizer_ends(self) -> None:
        """Record that the optimizer's step ends."""
        if self._begun:
            self.found.append(["optimizer", self._begun.pop(), clock(), 0])

    def _places(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        yield torch.autograd, "backward", self._backward
        yield torch, "save", functools.partial(self._around, "save")
        yield dataloader._BaseDataLoaderIter, "__next__", self._next  # noqa: SLF001  # torch has no public name for it
        yield dataloader.DataLoader, "__iter__", functools.partial(self._around, "input")
        yield DistributedDataParallel, "_sync_buffers", functools.partial(self._around, "buffers")
        yield DistributedDataParallel, "_post_forward", self._search
        for name in _COLLECTIVES:
            yield dist, name, self._collective
        yield from places(lambda kind, _: self._within(kind))
        if (fleet := sys.modules.get("real.engine.executor")) is not None:
            yield fleet.Executor, "wait", functools.partial(self._around, "gradients")
            yield fleet.ModelBuffers, "send", functools.partial(self._around, "buffers")

    @contextmanager
    def _noting(self, kind: Kind) -> Iterator[None]:
        begin = clock()
        try:
            yield
        finally:
            if threading.get_ident() == self._thread:
                self.found.append([kind, begin, clock(), 0])

    def _around(self, kind: Kind, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **named: Any) -> Any:
            with self._noting(kind):
                return function(*arguments, **named)

        return noted

    @contextmanager
    def _within(self, kind: Kind) -> Iterator[None]:
        """Record a wait of ``fully_shard``. Collectives inside it do not count as the script's."""
        self._is_in_unit = True
        try:
            with self._noting(kind):
                yield
        finally:
            self._is_in_unit = False

    def _backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        noted = self._around("backward", function)

        def backward(*arguments: Any, **named: Any) -> Any:
            result = noted(*arguments, **named)
            if threading.get_ident() == self._thread:
                self._backwards.append(self.found[-1])
            return result

        return backward

    def _search(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def post_forward(model: DistributedDataParallel, output: Any) -> Any:
            finds = model.find_unused_parameters and not model.static_graph and torch.is_grad_enabled()
            with self._noting("unused") if finds else nullcontext():
                return function(model, output)

        return post_forward

    def _collective(self, function: Callable[..., Any]) -> Callable[..., Any]:
        noted = self._around("collective", function)

        def collective(*arguments: Any, **named: Any) -> Any:
            groups = [each for each in (*arguments, *named.values()) if isinstance(each, dist.ProcessGroup)]
            is_of_all = not self._is_in_unit and all(group is dist.group.WORLD for group in groups)
            return noted(*arguments, **named) if is_of_all and not named.get("async_op") else function(*arguments, **named)

        return collective

    def _next(self, function: Callable[..., Any]) -> Callable[..., Any]:
        noted = self._around("input", function)

        def following(iterator: Any) -> Any:
            begin = clock()
            try:
                return noted(iterator)
            finally:
                if threading.get_ident() == self._thread:
                    of_loader = self._loaders.setdefault(id(iterator), [iterator._num_workers, 0])  # noqa: SLF001  # as above
                    of_loader[1] += clock() - begin

        return following

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        """Record the script's line 50 times per second, in another thread."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(1 / _SAMPLES_PER_S):
                frame = sys._current_frames().get(self._thread)  # noqa: SLF001  # Python has no public name for it
                while frame is not None and (
                    frame.f_code.co_filename.startswith((*_BELOW, "<")) or "-packages" in frame.f_code.co_filename
                ):
                    frame = frame.f_back
                if frame is not None:
                    line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
                    self.samples.append((clock(), line))

        thread = threading.Thread(target=run, name="line-samples", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
