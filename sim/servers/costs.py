"""Costs: how long the operations of trainers, senders and servers keep them busy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fleetbench.plan.layers import LayerTable
from fleetbench.plan.operations import Operation
from fleetbench.plan.servers.states import Role


class Costs(Protocol):
    """What an operation takes, in whole nanoseconds. It is asked once for every operation, in the order in which they begin."""

    def took_ns(self, role: Role, rank: int, operation: Operation, nbytes: int) -> int:
        """``nbytes``: of the push, or of the answer, that the operation is about; 0 where it is about none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A time for every message that a server hears about, and one for every byte; trainers' and senders' own work."""

    push_ns: int = 0
    """A server's work on a push, however small."""
    push_ns_per_byte: float = 0.0
    answer_ns: int = 0
    """A server's work on what it is asked for."""
    answer_ns_per_byte: float = 0.0
    update_ns: int = 0
    """A trainer's own update, in GeoSGD."""
    merge_ns: int = 0
    """A sender's work on a push."""
    install_ns: int = 0
    """A sender's work on what it pulled."""

    def took_ns(self, role: Role, rank: int, operation: Operation, nbytes: int) -> int:  # noqa: ARG002  # all ranks alike
        """See ``Costs``."""
        kind = operation.kind
        if role == "server":
            if kind in ("update", "accumulate"):
                return self.push_ns + round(nbytes * self.push_ns_per_byte)
            if kind == "send" and operation.payload in ("parameters", "rows"):
                return self.answer_ns + round(nbytes * self.answer_ns_per_byte)
            return 0
        if role == "trainer":
            return self.update_ns if kind == "update" else 0
        return {"merge": self.merge_ns, "install": self.install_ns}.get(kind, 0)


def costs_of(table: LayerTable, gradient_bytes: int) -> Linear:
    """What a layer table tells: an update over all parameters takes ``table.update``, and one over a part of them its share by bytes.

    ``gradient_bytes``: of one step's gradient over all servers together.
    """
    return Linear(push_ns_per_byte=table.update / gradient_bytes if gradient_bytes else 0.0, update_ns=table.update, merge_ns=table.merge)
