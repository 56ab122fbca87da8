"""Observer: a rank's part in ``fleetbench why``, next to the script's own DDP or ``fully_shard``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from fleetbench.config import encode
from fleetbench.errors import ConfigError
from fleetbench.why.change import DdpChange
from fleetbench.why.observed import RankLog
from real.fully_shard import ShardedModel, refuse_mixed
from real.job.driver_watch import end_script, watch_driver
from real.job.folder import BeatWriter, RankSide
from real.processes.attached import note_attached
from real.processes.exits import at_exit
from real.processes.place import Place
from real.why.events import Events, clock
from real.why.links import device_of_group, gathered, measure_links
from real.why.look import ANSWER, Look
from real.why.readiness import ReadinessClock, median_ns
from real.why.settings import LivingDdp, library_of
from real.why.trackers import log_to_open_runs

if TYPE_CHECKING:
    from real.why.fleet_model import FleetModel

_LEAST_STEPS = 10
_MOST_FORWARDS = 1000
"""Number of forwards with gradients after which a model whose optimizer has not stepped is assumed never to train."""
_MEETINGS = 9
_LINKS_SIZES = (64 * 2**10, 512 * 2**10, 4 * 2**20)
_LINKS_S = 1.0
"""Seconds for measuring the links of a group."""
_SAMPLE_RATE = 100
"""Torch's default: the Reducer times one of this many iterations."""
Part = dict[str, Any]
Steps = Generator[None, bool, Part]
"""Generator that resumes after each optimizer step with whether the script is over; it returns this rank's
part of a look."""


class Observer:
    """Carries out the driver's looks at the steps of a model.

    Life cycle: created at the model's first forward with gradients -> looks -> the driver says stop, and
    ``SystemExit`` is raised. A look begins and ends with an optimizer step. If the script ends first, the
    observer reports what it has seen. Steps are those of the first optimizer that steps and holds parameters
    of the model. All ranks look at the same steps.
    """

    def __init__(self, model: nn.Module, living: LivingDdp | FleetModel | ShardedModel) -> None:
        self._model, self._living = model, living
        self._rank, self._group = dist.get_rank(), living.group
        watch_driver(self._rank)
        self._device = device_of_group(living.group, living.device_type)
        self._backend = "nccl" if self._device.type == "cuda" else "gloo"
        self._folder = RankSide.of_environment()
        self._beats = BeatWriter(self._folder.beats, self._rank)
        self._folder.join(self._rank, dist.get_world_size(), Place.here().host)
        note_attached()
        self._wrapper = library_of(model)
        self._events: Events | None = None
        self._models: list[nn.Module] = []
        """Models whose forward has run, in the order of their first forward."""
        self._number = 0
        self._optimizer: int | None = None
        self._num_steps = self._num_forwards = 0
        self._batches: list[int] = []
        self._buffers_change = False
        self._looks = self._obey()
        next(self._looks)
        register_optimizer_step_pre_hook(self._steps)
        register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))
        at_exit(self._exits)

    @contextmanager
    def forward(self, model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Iterator[None]:
        """Record a model's forward, which runs inside the context."""
        self._beats.beat(self._number, self._num_steps + 1)  # a rank that hangs before its forward is a step behind the others
        if not any(model is known for known in self._models):
            self._models.append(model)
            refuse_mixed(self._models)
            self._time_models()
        if self._optimizer is None and model is self._model and torch.is_grad_enabled():
            self._num_forwards += 1
            if self._num_forwards > _MOST_FORWARDS:
                what = f"has no step that could be looked at: in {_MOST_FORWARDS} forwards no optimizer of the model has stepped"
                raise ConfigError(what, "the command", hint="a step ends where step() of an optimizer of torch's returns")
        if self._events is None:
            yield
            return
        if torch.is_grad_enabled() and model is self._model:
            tensor = next((leaf for leaf in pytree.tree_leaves((inputs, named)) if isinstance(leaf, torch.Tensor)), None)
            self._batches.append(0 if tensor is None else tensor.numel())
        looks = model is self._model and not self._buffers_change and len(self._batches) <= _LEAST_STEPS
        before = self._versions() if looks else []
        with self._events.forward(model):
            yield
        self._buffers_change |= looks and before != self._versions()

    def _versions(self) -> list[int]:
        return [buffer._version for buffer in self._living.module.buffers()]  # noqa: SLF001  # torch has no public name for it

    def _steps(self, _optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> Any:
        return None if self._events is None else self._events.optimizer_begins(arguments, named)

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._events is not None:
            self._events.optimizer_ends()
        if self._optimizer is None:
            known = {id(parameter) for parameter in self._living.module.parameters()}
            if any(id(parameter) in known for group in optimizer.param_groups for parameter in group["params"]):
                self._optimizer = id(optimizer)
        if id(optimizer) == self._optimizer:
            self._num_steps += 1
            self._looks.send(False)

    def _exits(self) -> None:
        with suppress(StopIteration):
            self._looks.send(True)

    def _obey(self) -> Generator[None, bool, None]:
        while (look := self._folder.wait_for(self._number, Look)) is not None:
            part = yield from self._look(look)
            self._folder.finish(self._number, self._rank, part | {"num_steps": self._num_steps})
            if not part["complete"]:
                return
            self._number += 1
        self._living.change(DdpChange())
        if self._rank == 0 and (answer := self._folder.path / ANSWER).exists():
            log_to_open_runs(json.loads(answer.read_text(encoding="utf-8")))
        end_script()

    def _look(self, look: Look) -> Steps:
        self._living.change(look.change)
        times = [clock()]
        if (yield from self._passed(look.warmup_steps, lambda: times.append(clock()))):
            return {"complete": False, "log": None}
        step_s = median_ns(later - earlier for earlier, later in pairwise(times)) * 1e-9
        fitting = int(look.max_s / max(step_s, 1e-9))
        steps = self._told(max(min(_LEAST_STEPS, look.steps), min(look.steps, fitting)))[0]
        part = yield from {"watch": self._watch, "ready": self._ready, "times": self._times}[look.what](steps, look)
        if look.links and part["complete"]:
            pairs = self._backend != "nccl"  # NCCL makes a communicator for each pair
            part["links"] = encode(measure_links(self._group, _LINKS_SIZES, _LINKS_S, device=self._device, pairs=pairs))
        return part

    def _times(self, steps: int, look: Look) -> Steps:
        begin = time.perf_counter()
        path = self._folder.path / f"{look.trace}-rank{self._rank}.json"
        with _tracing(path, stacks=look.stacks) if look.trace else nullcontext() as trace:
            is_over = yield from self._passed(steps, lambda: trace and trace.step())
        return {"complete": not is_over, "step_s": (time.perf_counter() - begin) / steps}

    def _watch(self, steps: int, _look: Look) -> Steps:
        before = clock(), self._ahead_ns()
        events, ends = Events(), [clock()]
        begin_s, cpu_s = time.perf_counter(), _cpu_s()
        self._batches.clear()
        with ExitStack() as stack:
            stack.enter_context(events.on())
            for module in {self._living.module, *(model.module for model in self._models if isinstance(model, DistributedDataParallel))}:
                stack.enter_context(events.evaluations(module))
            self._events = events
            self._time_models()
            # the last step's exchange is known in the forward after it
            is_over = yield from self._passed(steps + 1, lambda: ends.append(clock()))
            self._events = None
            self._time_models()
        log = RankLog(
            rank=self._rank,
            host=Place.here().host,
            device=self._living.device_type,
            threads=torch.get_num_threads(),
            sets_threads=os.environ.get("OMP_NUM_THREADS", "").isdecimal()
            and int(os.environ["OMP_NUM_THREADS"]) != torch.get_num_threads(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            cpu_cores=(_cpu_s() - cpu_s) / (time.perf_counter() - begin_s),
            step_ends_ns=tuple(ends[:-1]),
            events=tuple(tuple(event) for event in events.found),
            samples=tuple(events.samples),
            batches=tuple(self._batches),
            model=self._living.described(buffers_change=self._buffers_change),
            loader=events.loader,
            can_change=self._living.can_change,
            num_models=len(self._models),
            wrapper=self._wrapper,
        )
        after = before if is_over else (clock(), self._ahead_ns())
        return {"complete": not is_over, "log": asdict(log.aligned(before, after))}

    def _ready(self, steps: int, _look: Look) -> Steps:
        assert isinstance(self._model, DistributedDataParallel)
        ready = ReadinessClock(self._model)
        with ready.on():
            is_over = yield from self._passed(steps, ready.step_ends)
        found = ready.found()
        return {"complete": not is_over, "ready": None if found is None else encode(found)}

    def _passed(self, steps: int, each: Callable[[], object]) -> Generator[None, bool, bool]:
        """Let ``steps`` steps pass, and call ``each`` after each one; return whether the script ended before."""
        for _ in range(steps):
            if (yield):
                return True
            each()
        return False

    def _time_models(self) -> None:
        """Make each Reducer time all exchanges while events are recorded, else as often as torch's default."""
        every = _SAMPLE_RATE if self._events is None else 1
        for model in self._models:
            if isinstance(model, DistributedDataParallel):
                model._set_ddp_runtime_logging_sample_rate(every)  # noqa: SLF001  # torch has no public name for it

    def _told(self, own: Any) -> list[Any]:
        """Return the data of every rank, by rank; all ranks call it."""
        return gathered(self._group, self._device, own)

    def _ahead_ns(self) -> int:
        """Return by how many ns this host's clock is ahead of rank 0's, from when ranks leave barriers."""
        left = []
        for _ in range(1 + _MEETINGS):
            dist.barrier(self._group)
            left.append(clock())
        kernel = Place.here().kernel
        of_first, first = self._told([kernel, left])[0]
        # the first barrier only aligns ranks that arrive at different times
        return 0 if of_first == kernel else median_ns(own - other for own, other in zip(left[1:], first[1:], strict=True))


def _cpu_s() -> float:
    """Return the CPU seconds of this process and its children, such as a loader's workers."""
    found = 0.0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended in the meantime
            found += sum(process.cpu_times()[:2])
    return found


def _tracing(path: Path, *, stacks: bool) -> Any:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    return profile(activities=activities, with_stack=stacks, on_trace_ready=lambda trace: trace.export_chrome_trace(str(path)))
