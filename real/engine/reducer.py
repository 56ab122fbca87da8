"""PlannedReducer: a DistributedDataParallel with a plan's buckets, which does not wrap the model.

torch's own Reducer detects when a bucket's gradients are ready, keeps ``.grad`` in the buckets' flat buffers, and
handles sparse gradients, strides, the script's own hooks and unused parameters. A communication hook hands each
bucket to the engine.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket, Logger, Reducer
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from fleetbench.plan.combination import Combination
from fleetbench.plan.fusion import Bucket
from real.communication.communicators import Communicators
from real.engine.gradients import versions
from real.older_torch import without_first_sync


class _Laid(Reducer):
    """A Reducer that never rebuilds its buckets, because a plan has chosen them."""

    def _rebuild_buckets(self) -> bool:
        self._check_reducer_finalized()
        return False


class PlannedReducer(DistributedDataParallel):
    """A DistributedDataParallel that refers to the model but does not wrap it, so that ``state_dict`` keys stay.

    ``on_bucket`` is called with number and buffer of each bucket whose gradients are ready, in the plan's order on every
    rank, on the backward's thread; in a static graph's first backward, at its end. A bucket's buffer is the same in
    every step. This class divides nothing, and exchanges only the flags of unused parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        buckets: Sequence[Bucket],
        sparse: Collection[str],
        communicators: Communicators,
        what: Combination,
        on_bucket: Callable[[int, torch.Tensor], None],
    ) -> None:
        self.__dict__["_laid_out"] = buckets, parameters, sparse  # the base class reads it before attributes may be set
        group = communicators.beside if what.finds_unused or what.is_static else communicators.world
        with without_first_sync(model) as given:
            super().__init__(model, process_group=group, gradient_as_bucket_view=True, find_unused_parameters=what.finds_unused, **given)
        self.broadcast_buffers = False
        self._counts = what.is_static
        """Whether the next backward is a static graph's first."""
        self._numbers = numbers = deque[int]()  # the hook refers to it and not to self, which torch would keep alive
        """Numbers of the buckets to come at the end of a static graph's first backward, where torch counts none."""
        self.require_backward_grad_sync = False  # forwards prepare nothing: ``expect`` does, for a backward that is exchanged

        found: dict[int, torch.futures.Future[torch.Tensor]] = {}

        def hear(_state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            index, buffer = numbers.popleft() if numbers else bucket.index(), bucket.buffer()
            on_bucket(index, buffer)
            if (done := found.get(index)) is None:
                # A future accepts results only on the devices that it was given.
                devices: list[int | str | torch.device] = [] if buffer.device.type == "cpu" else [buffer.device]
                done = found[index] = torch.futures.Future(devices=devices)
                done.set_result(buffer)  # done at once, and reused: the engine waits for the exchange
            return done

        self.register_comm_hook(None, hear)

    def expect(self, nodes: Sequence[Any]) -> None:
        """Prepare to exchange the current backward; ``nodes``: the parameters' nodes in order, see ``nodes_of``.

        The Reducer takes parameters for unused that cannot be reached from the tensors it is given: here, views of
        those that the backward reaches. If it reaches none (``torch.autograd.grad``), nothing is exchanged; all
        parameters are then given, so that none is unused.
        """
        parameters = [*self.__dict__["_laid_out"][1].values()] if self.find_unused_parameters else []
        used = [parameter for parameter, node in zip(parameters, nodes, strict=False) if leaves_gradients([node])]
        if self._counts:
            if not self.static_graph:  # torch would count earlier backwards that are not exchanged
                self._set_static_graph()  # type: ignore[no-untyped-call]  # torch's
            end = partial(self._counted, versions(self.__dict__["_laid_out"][1].values()))
            Variable._execution_engine.queue_callback(end)  # noqa: SLF001  # as DDP learns of the backward's end
        with torch.enable_grad():
            self.reducer.prepare_for_backward([parameter.view_as(parameter) for parameter in used or parameters])

    def _counted(self, before: list[Any]) -> None:
        """Exchange all buckets of a static graph's first backward; one that has left no gradient is not the first."""
        if versions(self.__dict__["_laid_out"][1].values()) != before:
            self._counts = False
            self._numbers.extend(range(len(self.__dict__["_laid_out"][0])))
            self.reducer._delay_all_reduce()  # type: ignore[attr-defined]  # noqa: SLF001  # as DDP

    @property
    def missing(self) -> list[int] | None:
        """Indices, in bucket order, of parameters that the last backward did not reach; None if it reached all."""
        try:
            self.reducer._check_reducer_finalized()  # noqa: SLF001  # the next forward of a DDP asks the same
        except RuntimeError as error:
            listed = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            return [] if listed is None else [int(index) for index in listed[1].split()]
        return None

    def shadow_flags(self) -> None:
        """Take part in the exchange of flags of unused parameters, with this rank's last flags, as DDP's join does."""
        if self.find_unused_parameters:
            dist.all_reduce(self.reducer._get_local_used_map(), group=self.process_group)  # noqa: SLF001  # torch has no public name for it

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        self.reducer._remove_autograd_hooks()  # noqa: SLF001  # torch has no public name for it

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]  # torch's
        buckets, parameters, sparse = self.__dict__["_laid_out"]
        names = [name for bucket in buckets for name in bucket.gradients]
        return [parameters[name] for name in names], [name in sparse for name in names]

    def _ddp_init_helper(self, parameters: list[torch.Tensor], sparse: list[bool], names: dict[int, str], static_graph: bool) -> None:
        """See the base class; the buckets are those of the plan."""
        buckets = self.__dict__["_laid_out"][0]
        number, indices, limits = 0, [], []
        for bucket in buckets:
            indices.append([*range(number, number + len(bucket.gradients))])
            limits.append(sum(parameters[index].nbytes for index in indices[-1]))
            number += len(bucket.gradients)
        self.reducer = _Laid(
            parameters, indices, limits, self.process_group, sparse, max(limits), self.find_unused_parameters,
            self.gradient_as_bucket_view, names,
        )  # fmt: skip
        self.logger = Logger(self.reducer)
        self.reducer.set_logger(self.logger)
        self.logger.set_construction_data_and_log(type(self.module).__name__, [], -1, False, False, static_graph)


def nodes_of(parameters: Collection[nn.Parameter]) -> list[Any]:
    """Return each parameter's autograd node that accumulates its gradient; the list keeps them alive."""
    return [torch.autograd.graph.get_gradient_edge(parameter).node for parameter in parameters]


def leaves_gradients(nodes: Collection[Any]) -> bool:
    """Whether the current backward leaves a gradient by any of these nodes; ``torch.autograd.grad`` leaves none."""
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))  # noqa: SLF001  # as register_multi_grad_hook asks
    except RuntimeError:  # of a parameter whose gradient is returned
        return False
