"""Operations: what an executor is told to start."""

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

    Between ranks (``COLLECTIVES``): the ranks of ``group`` start it on ``communicator`` in one
    order, and as many are under way there as it carries (``fleetbench.plan.groups``); a rank that is
    in none of the group's parts takes it as done. Of a rank:

    - ``gate`` holds its compute until what it comes after has ended;
    - ``update`` applies the optimizer, to one bucket where it names one; ``skip`` leaves it out;
    - ``accumulate`` adds a micro-batch's gradient to a bucket's sum, and ``release`` makes that sum
      over ``divisor`` the gradient;
    - ``difference`` takes the delta of a trainer that trains alone;
    - ``outer`` makes the averaged delta the step of the outer optimizer (``fleetbench.plan.outer``);
    - ``merge`` replaces the parameters by the snapshot plus the averaged delta; as a ``mixture``, a share of them stays;
    - ``reset`` clears what its payload names: the optimizer's state, or a gradient's sum;
    - ``hold`` keeps batch-norm statistics where they are in this micro-batch.

    Those of parameter servers, and what they mean there, are in ``fleetbench.plan.servers.training``.
    """

    id: int
    """Unique in a rank's run, and the same on every rank of a trainers' group."""
    kind: Collective | Local
    payload: Payload | None = None
    """What it carries or changes; ``delta`` is the parameters minus the last snapshot, ``unused`` one flag a parameter.

    ``agreement`` is where each trainer is in its training, and its learning rate; ``loss`` these with its loss.
    """
    bucket: int | None = None
    nbytes: int = 0
    """Of the whole bucket, also where a rank holds a part of it."""
    wire_dtype: str | None = None
    group: str = "world"
    communicator: int = 0
    divisor: int = 1
    fragment: int | None = None
    """``difference``, ``outer`` and ``merge``: the part of the model that they change; none: all of it."""
    after: tuple[int, ...] = ()
    message: str | None = None
    """``send``: kind of the ``Message`` that the receiver is told."""
    rank: int | None = None
    """The one of the group that it concerns; none: all."""
    count: int = 0
    """Gradients that it is about."""
    delay_ns: int = 0
    """``set_timer``: until ``TimerFired``. A role has one timer; setting it again restarts it."""

    def shifted(self, base: int) -> Operation:
        """The same operation ``base`` ids further on."""
        return dataclasses.replace(self, id=self.id + base, after=tuple([other + base for other in self.after]))


Operations = tuple[Operation, ...]


def tupled(data: Any) -> Any:
    """JSON's data with tuples for its lists."""
    if isinstance(data, dict):
        return {key: tupled(value) for key, value in data.items()}
    return tuple(map(tupled, data)) if isinstance(data, list) else data


def wire_bytes(operation: Operation, ranks: int) -> int:
    """Bytes one rank sends, in the mean over ``ranks``, for a collective of S bytes in a ring.

    An all-reduce sends 2((P-1)/P)S. A reduce and a broadcast pass S on P - 1 times, and a
    reduce-scatter and an all-gather are the halves of an all-reduce: ((P-1)/P)S each. Gathered
    rows (``rows``) of S bytes a rank reach the P - 1 others: (P-1)S.
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
