"""One rank of the parity tests: trains every case with the engine, or with DDP, and saves its parameters of every step.

``parity_rank.py RANK RANKS STORE OUTPUT BACKEND DTYPES WHICH``: types are separated by commas; the backend is
``gloo``, or ``deferred``, which has NCCL's semantics; the cases are ``all``, their ``sample``, or those of ``hierarchies``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import training_problem as problem
from counting import counted
from deferred import FakeStreams, StreamOrder, allowed, register
from parity_cases import HIERARCHICAL, LOCAL_HIERARCHICAL, OVERFLOW, Case, cases
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from fleetbench.strategy import DistributedStrategy
from real.communication.communicators import Communicators
from real.communication.lanes import StreamLane
from real.engine.engine import Engine


def main() -> None:
    """Run every case in every type, and save what each left over under ``TYPE/CASE/...``."""
    rank, ranks, store, output, backend, dtypes, which = sys.argv[1:]
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(ranks), timeout=timeout)
    torch.set_num_threads(1)
    ground: AbstractContextManager[Any] = nullcontext()
    communicators = Communicators("gloo", timeout)
    if backend == "deferred":
        streams = FakeStreams()
        register(streams)
        communicators = Communicators("deferred", timeout, lane=lambda _name: StreamLane(streams))
        ground = StreamOrder(streams)
    saved: dict[str, Any] = {}
    chosen = (*HIERARCHICAL, *LOCAL_HIERARCHICAL) if which == "hierarchies" else cases(int(ranks), sampled=which == "sample")
    for case in chosen:
        if backend == "gloo" or (case.strategy is not None and not case.cpu_only):
            with ground:
                saved |= _train_all(case, dtypes, communicators)
    np.savez(output, **saved)
    communicators.barrier()
    communicators.close()
    dist.destroy_process_group()


def _train_all(case: Case, dtypes: str, communicators: Communicators) -> dict[str, Any]:
    found = {}
    for dtype in dtypes.split(",") if "amp" not in case.name else ["float32"]:
        try:
            trained = train(case, dtype, communicators)
        except Exception as error:
            raise RuntimeError(f"case {case.name!r} in {dtype}") from error
        found |= {f"{dtype}/{case.name}/{name}": value for name, value in trained.items()}
    return found


def _compress_hook(dtype: torch.dtype) -> Callable[[object, dist.GradBucket], torch.futures.Future[torch.Tensor]]:
    """DDP's compression hooks, but for what Fleet does first: gradients are divided, cast, summed, and cast back."""

    def hook(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        small = (bucket.buffer() / dist.get_world_size()).to(dtype)
        work = dist.all_reduce(small, async_op=True)
        assert work is not None
        return work.get_future().then(lambda _future: bucket.buffer().copy_(small))

    return hook


def train(case: Case, dtype: str, communicators: Communicators) -> dict[str, Any]:
    """The parameters after every step, those after the end of training, the first gradient, and what the exchange was."""
    rank, ranks = communicators.rank, communicators.trainers
    network = problem.model(dtype, case.model)
    if isinstance(network, problem.Gated):
        network.rank = rank
    optimizer = problem.optimizer_of(case.optimizer)(network)
    trained, engine = _distribute(case, network, optimizer, communicators)
    found: dict[str, Any] = {}
    history, scales = [], []
    with counted() as collectives:
        for step in range(1, case.steps + 1):
            problem.decay(optimizer, step)
            inputs, labels = problem.own_batch(step, rank, ranks, dtype)
            if "amp" in case.name and step == OVERFLOW and rank == 1:
                inputs = inputs * 1e30
            loss = cross_entropy(trained(inputs), labels)
            if engine is not None:
                engine.report(loss)
            finds_unused = case.strategy is not None and case.strategy.get("find_unused_parameters")
            with allowed() if finds_unused else nullcontext():  # the Reducer looks at its map of used parameters, which lies on the host
                loss.backward()
            if step == 1 and case.model == "plain":
                with allowed():
                    found["gradient"] = torch.cat([p.grad.reshape(-1) for p in network.parameters() if p.grad is not None]).numpy()
            optimizer.step()
            optimizer.zero_grad()
            with allowed():
                history.append(problem.flat(network).numpy().copy())
            if engine is not None:
                scales.append(engine.loss_scale)
    if engine is not None:
        with counted() as behind:
            engine.flush(end=True)
        found |= {"buckets": np.array(len(engine.plan.buckets)), "collectives": np.array(len(collectives)), "scales": np.array(scales)}
        found["after"] = np.array(len(behind))
        with allowed():
            found["buffers"] = torch.cat([torch.zeros(1), *(buffer.reshape(-1).float() for buffer in network.buffers())]).numpy().copy()
            engine.close()
    with allowed():
        return {**found, "history": np.array(history), "end": problem.flat(network).numpy().copy()}


def _distribute(
    case: Case, network: torch.nn.Module, optimizer: torch.optim.Optimizer, communicators: Communicators
) -> tuple[torch.nn.Module, Engine | None]:
    if case.strategy is None:
        wrapped = DistributedDataParallel(network, find_unused_parameters=case.model == "gated")
        if case.hook:
            compress = _compress_hook(torch.float16 if case.hook == "fp16" else torch.bfloat16)
            wrapped.register_comm_hook(None, lambda state, bucket: compress(state, bucket))  # noqa: PLW0108  # DDP refuses bf16's by name on gloo
        return wrapped, None
    if communicators.rank > 0:  # the engine must start all ranks from rank 0's parameters
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(float(communicators.rank))
    engine = Engine(network, DistributedStrategy.from_dict(case.strategy), communicators)
    engine.attach_optimizer(optimizer)
    return network, engine


if __name__ == "__main__":
    main()
