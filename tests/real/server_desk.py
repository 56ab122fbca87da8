"""A server without a network: a test says what each trainer's connection brings, and reads what the server would send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fleetbench.plan.servers.rules import Mode, ServerRules, Table
from fleetbench.plan.servers.states import ServerState
from fleetbench.workloads.server_updates import OPTIONS, ROW
from real.servers.parameters import VERSION, Spec
from real.servers.server import ParameterServer
from real.servers.server_options import ServerOptions
from real.servers.wire import Head, Tensor, encode

ROWS = 4


class Clock:
    """A module ``time`` whose time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def monotonic_ns(self) -> int:
        """The same in nanoseconds."""
        return int(self.now * 1e9)


class Desk:
    """One server of a model with 2 dense numbers and a table of ``ROWS`` rows of 1, trained by SGD with rate 1."""

    def __init__(self, mode: Mode = "asynchronous", trainers: int = 2, restore: Path | None = None, **options: float) -> None:
        rules = ServerRules(mode=mode, trainers=trainers, servers=1, k_steps=2 if mode == "geo_sgd" else 0)
        self.spec = Spec(
            rules=rules,
            dense=2,
            tables=(Table(name="t", rows=ROWS, width=1),),
            dtype="float32",
            optimizer="sgd",
            options=OPTIONS["sgd"],
            names=("d",),
            sizes=(2,),
        )
        own = {"timeout_s": 30.0, "startup_timeout_s": 300.0, **options}
        self.server = ParameterServer(ServerOptions(server=0, servers=1, trainers=trainers, endpoint="127.0.0.1:1", **own))  # type: ignore[arg-type]  # as their names say
        if restore is not None:
            assert self.server.restore(restore)
        self._sent: list[tuple[Head, list[bytes]]] = []
        self.server._send = self._send  # type: ignore[method-assign]  # the network

    @property
    def state(self) -> ServerState:
        """The role's."""
        return self.server._state

    def say(
        self, kind: str, rank: int = 0, tensors: Sequence[Tensor] = (), *, connection: bytes | None = None, **fields: float
    ) -> list[tuple[str, int]]:
        """Kind and rank of what the server sends when this comes from ``rank``."""
        head = Head(kind, rank, **fields)  # type: ignore[arg-type]  # fields of a head
        self._sent.clear()
        self.server._hear(
            connection or b"%d" % rank, head, [memoryview(tensor).cast("B") if len(tensor) else memoryview(b"") for tensor in tensors]
        )
        return [(head.kind, head.rank) for head, _ in self._sent]

    def said(self, kind: str) -> list[bytes]:
        """The first tensor of each message of this kind that was just sent."""
        return [tensors[0] for head, tensors in self._sent if head.kind == kind]

    @property
    def is_stopping(self) -> bool:
        """Whether nobody trains any more."""
        return self.server._has_ended

    @property
    def failure(self) -> tuple[object, str] | None:
        """Whom the job has failed by, and why."""
        failure = self.server.failure
        return None if failure is None else (failure.where, failure.what)

    def join(self, rank: int) -> list[tuple[str, int]]:
        """A trainer joins; what the server sends."""
        return self.say("join", rank, [self.spec.to_json()])

    def enter(self, *ranks: int) -> None:
        """Trainers join, rank 0 first, who brings zeros."""
        for rank in ranks:
            self.join(rank)
            if rank == 0:
                self.say("initial", 0, self.everything)

    @property
    def everything(self) -> list[Tensor]:
        """Tensors of the parameters that rank 0 brings: zeros."""
        return [np.zeros(2, np.float32), np.zeros(ROWS, np.float32)]

    @staticmethod
    def push(dense: Sequence[float], rows: Sequence[int]) -> list[Tensor]:
        """Tensors of a gradient that takes so much from the dense numbers, and 1 from rows."""
        dtype = np.float32
        return [np.zeros(1, VERSION), np.array(dense, dtype), np.array(rows, ROW), np.ones(len(rows), dtype)]

    def dense(self) -> list[float]:
        """The dense numbers."""
        assert self.server.shard is not None
        return [float(number) for number in self.server.shard.dense]

    def _send(self, _identity: bytes, head: Head, tensors: Sequence[Tensor] = ()) -> None:
        encode(head, tensors)  # raises for what the network cannot carry
        self._sent.append((head, [tensor if isinstance(tensor, bytes) else tensor.tobytes() for tensor in tensors]))


@contextmanager
def desk(mode: Mode = "asynchronous", trainers: int = 2, restore: Path | None = None, **options: float) -> Iterator[Desk]:
    """A server that has been closed after it."""
    made = Desk(mode, trainers, restore, **options)
    try:
        yield made
    finally:
        made.server.close()
