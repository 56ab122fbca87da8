"""Operations: what an executor is told to start."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

Collective = Literal["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send"]
Local = Literal["update", "skip", "accumulate", "merge", "hold", "release", "set_timer"]

COLLECTIVES: frozenset[str] = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of one rank. It starts when every operation in ``after`` has ended.

    Between ranks (``COLLECTIVES``): the ranks of ``group`` start it on ``communicator`` in one
    order. Of a rank: ``update`` applies the optimizer, ``merge`` replaces the parameters by the
    snapshot plus the averaged delta.
    """

    id: int
    """Unique in a rank's run, and the same on every rank of a trainers' group."""
    kind: Collective | Local
    payload: Literal["gradient", "delta", "scalar", "rows"] | None = None
    """What a collective carries; ``delta`` is the parameters minus the last snapshot."""
    bucket: int | None = None
    nbytes: int = 0
    wire_dtype: str | None = None
    group: str = "world"
    communicator: int = 0
    after: tuple[int, ...] = ()

    def shifted(self, base: int, after: tuple[int, ...] = ()) -> Operation:
        """The same operation ``base`` ids further on; ``after`` is added to one that waits for nothing."""
        return dataclasses.replace(self, id=self.id + base, after=tuple(other + base for other in self.after) or after)


Operations = tuple[Operation, ...]


def wire_bytes(operation: Operation, ranks: int) -> int:
    """Bytes one rank sends for a collective among ``ranks``: a ring all-reduce of S sends 2((P-1)/P)S."""
    if operation.kind == "all_reduce":
        return 2 * (ranks - 1) * operation.nbytes // ranks
    if operation.kind in COLLECTIVES:
        raise AssertionError(f"no algorithm for {operation.kind}")
    return 0
