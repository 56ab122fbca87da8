"""Who accessed which bytes last, and what is in flight towards them.

A storage is a block, its bytes are segments, and each segment remembers its last write and the
reads since. What is ordered after what is the streams' affair: see ``fake_streams.py``.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from call_sites import call_site
from torch.multiprocessing.reductions import StorageWeakRef


class UnorderedAccess(AssertionError):  # noqa: N818  # says what happened
    """An operation touches bytes that another stream may be writing, or overwrites bytes that it may be reading."""


class AccessingStream(Protocol):
    """What the memory needs to know of a stream."""

    number: int
    name: str

    def is_behind(self, access: Access) -> bool:
        """Whether what is enqueued here next starts after ``access`` has ended."""
        ...


@dataclass(frozen=True, slots=True)
class Access:
    """An operation on a stream: the ``tick``-th there."""

    stream: AccessingStream
    tick: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} on {self.stream.name}"


@dataclass(slots=True)
class Flight:
    """A collective whose results are not in their tensors yet: ``land`` puts them there, and may block."""

    access: Access
    land: Callable[[], None]
    blocks: list[Block] = field(default_factory=list)


@dataclass(slots=True)
class Segment:
    """Bytes ``start`` to ``end`` of a storage, the last write to them, and since then the last read on each stream."""

    start: int
    end: int
    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict)


@dataclass(slots=True)
class Block:
    """A storage, kept apart from later ones at its address by a weak reference."""

    storage: StorageWeakRef
    allocation: Access | None = None
    """None where it was there before the order was."""
    segments: list[Segment] = field(default_factory=list)
    flights: list[tuple[int, int, Flight]] = field(default_factory=list)


class Memory:
    """The last accesses to every byte that was touched."""

    def __init__(self, refuse: Callable[[AssertionError], None]) -> None:
        self._refuse = refuse
        self._blocks: dict[int, Block] = {}
        self._sweep_at = 1024
        self.flights: list[Flight] = []
        self.dropped_in_use: list[str] = []

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage was touched before."""
        return tensor.untyped_storage()._cdata in self._blocks

    def touch(self, access: Access, tensor: torch.Tensor, *, write: bool) -> None:
        """An operation reads or writes a tensor. Raises ``UnorderedAccess``; lands what it is ordered after."""
        self.check_dropped()
        extent = _extent(tensor)
        if extent is None:
            return
        start, end = extent
        block = self._block(tensor)
        stream = access.stream
        pieces = _carve(block.segments, start, end)
        for piece in pieces:
            if piece.write is not None and not stream.is_behind(piece.write):
                self._unordered(access, "writes" if write else "reads", extent, piece.write, "wrote")
            for read in piece.reads.values() if write else ():
                if not stream.is_behind(read):
                    self._unordered(access, "overwrites", extent, read, "reads")
        for first, last, flight in list(block.flights):
            if first < end and start < last:
                self.land(flight)
        if write:
            _replace(block.segments, pieces, Segment(start, end, access))
        else:
            for piece in pieces:
                piece.reads[stream.number] = access

    def allocate(self, access: Access, tensor: torch.Tensor) -> None:
        """An operation made a tensor of its own."""
        if not self.knows(tensor):
            self.touch(access, tensor, write=True)
            if tensor.numel():
                block = self._block(tensor)
                block.allocation = access
                weakref.finalize(tensor.untyped_storage(), self._on_drop, block).atexit = False

    def check_dropped(self) -> None:
        """Raise ``UnorderedAccess`` for memory that was dropped too early."""
        if self.dropped_in_use:
            self._refuse(UnorderedAccess(self.dropped_in_use.pop()))

    def _unordered(self, access: Access, does: str, extent: tuple[int, int], other: Access, did: str) -> None:
        stretch = f"bytes {extent[0]}-{extent[1]}"
        self._refuse(UnorderedAccess(f"{access} {does} {stretch} that {other} {did}, and is not ordered after it (at {call_site()})"))

    def _on_drop(self, block: Block) -> None:
        assert block.allocation is not None
        owner = block.allocation.stream
        for segment in block.segments:
            for access in (segment.write, *segment.reads.values()):
                if access is not None and not owner.is_behind(access):
                    self.dropped_in_use.append(
                        f"memory of {block.allocation} is dropped while {access} may still use it (before {call_site()})"
                    )

    def fly(self, flight: Flight, results: Sequence[torch.Tensor]) -> None:
        """A collective will put its results into these tensors."""
        self.flights.append(flight)
        for tensor in results:
            extent = _extent(tensor)
            if extent is not None:
                block = self._block(tensor)
                block.flights.append((*extent, flight))
                flight.blocks.append(block)

    def land(self, flight: Flight) -> None:
        """Put a collective's results where they belong, once."""
        if flight in self.flights:
            self.flights.remove(flight)
            for block in flight.blocks:
                block.flights = [item for item in block.flights if item[2] is not flight]
            flight.land()

    def _block(self, tensor: torch.Tensor) -> Block:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            if len(self._blocks) >= self._sweep_at:
                self._blocks = {key: block for key, block in self._blocks.items() if block.flights or not block.storage.expired()}
                self._sweep_at = 2 * len(self._blocks) + 1024
            block = self._blocks[storage._cdata] = Block(StorageWeakRef(storage))
        return block


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First byte and one after the last of a tensor in its storage."""
    numel = tensor.numel()
    if numel == 0:
        return None
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    if tensor.is_contiguous():
        return start, start + numel * size
    span = 1 + sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + span * size


def _carve(segments: list[Segment], start: int, end: int) -> list[Segment]:
    """Cut the sorted segments at ``start`` and ``end``, and fill gaps, so that those returned cover just that."""
    if not segments:
        segments.append(Segment(start, end))
    if len(segments) == 1 and segments[0].start == start and segments[0].end == end:  # a whole tensor, as most are
        return segments[:]
    first = bisect_right(segments, start, key=lambda item: item.start)
    if first and segments[first - 1].end > start:
        first -= 1
    last = first
    while last < len(segments) and segments[last].start < end:
        last += 1
    old, inside, position = segments[first:last], [], start
    for item in old:
        if position < item.start:
            inside.append(Segment(position, item.start))
        position = min(end, item.end)
        inside.append(Segment(max(start, item.start), position, item.write, dict(item.reads)))
    if position < end:
        inside.append(Segment(position, end))
    head = [Segment(old[0].start, start, old[0].write, dict(old[0].reads))] if old and old[0].start < start else []
    tail = [Segment(end, old[-1].end, old[-1].write, dict(old[-1].reads))] if old and old[-1].end > end else []
    segments[first:last] = [*head, *inside, *tail]
    return inside


def _replace(segments: list[Segment], pieces: list[Segment], new: Segment) -> None:
    """Put one segment where ``pieces`` lie."""
    first = bisect_right(segments, pieces[0].start, key=lambda item: item.start) - 1
    segments[first : first + len(pieces)] = [new]
