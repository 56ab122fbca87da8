"""Operations: what an executor has to start."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Collective = Literal["all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send"]
Trained = Literal["gate", "update", "skip", "accumulate", "release", "difference", "outer", "merge", "reset", "hold"]
Local = Trained | Literal["set_timer", "wait", "mark", "install", "stop"]
Payload = Literal["gradient", "delta", "state", "buffers", "rows", "unused", "loss", "agreement", "found_inf", "parameters", "mixture"]

COLLECTIVES: frozenset[str] = frozenset({"all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "send"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of one rank. It starts when every operation in ``after`` has ended.

    All ranks of ``group`` start operations between ranks (``COLLECTIVES``) on ``communicator`` in the same
    order; ``fleetbench.plan.groups`` says how many run at once. A rank in none of the group's parts treats
    them as done. Operations of one rank:

    - ``gate`` delays compute until the operations in ``after`` have ended;
    - ``update`` applies the optimizer, to one bucket if ``bucket`` is set; ``skip`` ends a step without an
      update;
    - ``accumulate`` adds a micro-batch's gradient to a bucket's sum, and ``release`` makes that sum over
      ``divisor`` the gradient;
    - ``difference`` computes the delta if there is only one trainer;
    - ``outer`` turns the averaged delta into the step of the outer optimizer (``fleetbench.plan.outer``);
    - ``merge`` replaces the parameters by the snapshot plus the averaged delta; with payload ``mixture``, a
      share of the trainer's own values stays;
    - ``reset`` clears what its payload names: the optimizer's state, or a gradient's sum;
    - ``hold`` keeps batch-norm statistics unchanged in this micro-batch.

    Operations of parameter servers are described in ``fleetbench.plan.servers.training``.
    """

    id: int
    """Id of the operation, unique in a rank's run, and equal on all trainers of a group."""
    kind: Collective | Local
    payload: Payload | None = None
    """Content that the operation carries or changes. ``delta`` is the parameters minus the last snapshot;
    ``unused`` has one flag per parameter.

    ``agreement`` is each trainer's progress and learning rate; ``loss`` adds its loss.
    """
    bucket: int | None = None
    nbytes: int = 0
    """Bytes of the whole bucket, even if a rank holds only a part of it."""
    wire_dtype: str | None = None
    group: str = "world"
    communicator: int = 0
    divisor: int = 1
    fragment: int | None = None
    """Index of the fragment that ``difference``, ``outer`` and ``merge`` change. None: the whole model."""
    after: tuple[int, ...] = ()
    message: str | None = None
    """Kind of the ``Message`` that the receiver of a ``send`` gets."""
    rank: int | None = None
    """Rank in the group that the operation concerns. None: all ranks."""
    count: int = 0
    """Number of gradients, or in GeoSGD of recorded steps, that the operation concerns."""
    delay_ns: int = 0
    """Time in ns from ``set_timer`` to ``TimerFired``. A role has one timer; setting it again restarts it."""

    def shifted(self, base: int) -> Operation:
        """Return a copy with ``base`` added to its id and to the ids in ``after``."""
        return dataclasses.replace(self, id=self.id + base, after=tuple([other + base for other in self.after]))


Operations = tuple[Operation, ...]


def tupled(data: Any) -> Any:
    """Return JSON data with tuples instead of lists."""
    if isinstance(data, dict):
        return {key: tupled(value) for key, value in data.items()}
    return tuple(map(tupled, data)) if isinstance(data, list) else data


def wire_bytes(operation: Operation, ranks: int) -> int:
    """Return the bytes that one rank sends for a collective of S bytes in a ring, averaged over P = ``ranks`` ranks.

    An all-reduce sends 2((P-1)/P)S. A reduce and a broadcast forward S bytes P - 1 times in total, and a
    reduce-scatter and an all-gather are the halves of an all-reduce: ((P-1)/P)S each. Gathered rows
    (``rows``) of S bytes per rank go to the P - 1 others: (P-1)S. A ``send`` sends S.
    """
    if operation.kind not in COLLECTIVES or ranks == 1:
        return 0
    if operation.kind == "all_reduce":
        return 2 * (ranks - 1) * operation.nbytes // ranks
    if operation.payload == "rows":
        return (ranks - 1) * operation.nbytes
    if operation.kind == "send":
        return operation.nbytes
    return (ranks - 1) * operation.nbytes // ranks
