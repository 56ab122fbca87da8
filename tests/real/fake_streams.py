"""Streams of a device that is not there, which find what a program left unordered.

Operations run on the CPU as they are called; what is followed is the order that a device with
streams would have been told of. Every stream has a vector clock; a wait joins the clocks, and an
operation follows another if its stream's clock has reached it. ``StreamOrder`` hears of every
operation and holds it against the last accesses to the same bytes:

- bytes that another stream wrote (for a write: or read) and that the current stream is not
  ordered after raise ``UnorderedAccess``;
- results of collectives are poison until an operation touches them that is ordered after the
  ``wait()``: then they land (``deferred.py`` issues them);
- memory that is dropped while another stream may still use it raises ``UnorderedAccess`` at the
  next operation: a device's allocator would give it away at once, in the order of the stream that
  allocated it;
- a read by the host raises ``HostSynchronised``, except inside ``allowed()``.

Bytes are told apart by their range in a storage, because slices of one flat buffer carry
different buckets. A view that is not dense counts as the whole stretch that it spans. Not seen:
C++ that reads memory without an operation, and ``tensor.to("cpu")``, which is a copy on a device
and nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from threading import get_ident
from types import TracebackType
from typing import Any, Self

import torch
from call_sites import call_site, is_optimizers_own
from fake_memory import Access, Memory, UnorderedAccess
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from real.communication.lanes import MAY_WAIT, host_reads

allowed = host_reads
"""Inside this context the host may read device values; product code marks its own few places by ``host_reads``."""


class HostSynchronised(AssertionError):  # noqa: N818  # says what happened
    """The host read a device value, and would have waited for the device."""


class ConcurrentCommunicators(AssertionError):  # noqa: N818  # says what happened
    """Two communicators have collectives in flight although they are to be serialised."""


@dataclass(frozen=True, slots=True)
class FakeEvent:
    """What a stream was ordered after when it was recorded."""

    clock: dict[int, int]


class FakeStream:
    """A stream: a number, and the vector clock of what its next operation is ordered after."""

    def __init__(self, device: FakeStreams, number: int, name: str) -> None:
        self._device = device
        self.number = number
        self.name = name
        self.clock = {number: 0}

    def wait_event(self, event: FakeEvent) -> None:
        """As ``torch.cuda.Stream`` has it."""
        if not self._device.omits():
            _join(self.clock, event.clock)

    def wait_stream(self, stream: FakeStream) -> None:
        """As ``torch.cuda.Stream`` has it."""
        if not self._device.omits():
            _join(self.clock, stream.clock)

    def record_event(self) -> FakeEvent:
        """As ``torch.cuda.Stream`` has it."""
        return FakeEvent(dict(self.clock))

    def follow(self, stream: FakeStream) -> None:
        """A wait that belongs to the device itself, and cannot be forgotten."""
        _join(self.clock, stream.clock)

    def runs(self, what: str) -> Access:
        """Enqueue an operation."""
        _join(self.clock, self._device.host_clock)
        self.clock[self.number] += 1
        return Access(self, self.clock[self.number], what)

    def is_behind(self, access: Access) -> bool:
        """Whether what is enqueued here next starts after ``access`` has ended."""
        return self.clock.get(access.stream.number, 0) >= access.tick


class FakeStreams:
    """The streams of a device that is not there: has the names of ``torch.cuda``.

    ``omit(site)`` leaves out the waits of a site, to show that a test notices; a site is
    ``file.py:function:line < file.py:function:line``, the caller and its caller outside of torch
    and this kit. ``waits`` holds the sites of all waits so far. (To leave out a single wait is
    often right: a later one on the same stream covers it.)
    """

    def __init__(self, omit: Callable[[str], bool] | None = None) -> None:
        self.omit = omit
        self.waits: list[str] = []
        self.issued: list[tuple[str, str, int, str]] = []
        """Communicator, kind, elements and type of every collective; every rank must have the same list."""
        self.violations: list[AssertionError] = []
        """What a stream order that does not raise has found."""
        self.memory = Memory(self.refuse)
        self.host_clock: dict[int, int] = {}
        self.order: StreamOrder | None = None
        """The order in force, if any. Without one a wait blocks, as on gloo."""
        self.forgets_works = False
        self.aside = 0
        self.communicators: list[object] = []
        self._streams: list[FakeStream] = []
        self._default = self.named("the default stream")
        self._current: dict[int, FakeStream] = {}

    def named(self, name: str) -> FakeStream:
        """A new stream with a name for messages."""
        self._streams.append(FakeStream(self, len(self._streams), name))
        return self._streams[-1]

    def Stream(self, priority: int = 0) -> FakeStream:  # noqa: ARG002, N802  # which runs first changes no order; torch's name
        """As ``torch.cuda`` has it."""
        return self.named(f"side stream {len(self._streams)}")

    def current_stream(self) -> FakeStream:
        """As ``torch.cuda`` has it."""
        return self._current.get(get_ident(), self._default)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """As ``torch.cuda`` has it."""
        before, self._current[get_ident()] = self.current_stream(), stream
        try:
            yield
        finally:
            self._current[get_ident()] = before

    @property
    def ordered(self) -> bool:
        """Whether a stream order is in force in this thread; a mode of torch reaches no other."""
        return self.order is not None and self.order.thread == get_ident()

    def omits(self) -> bool:
        """Count a wait; whether it is to be left out."""
        site = call_site(2)
        self.waits.append(site)
        return self.omit is not None and self.omit(site)

    def synchronise(self, stream: FakeStream | None = None) -> None:
        """The host waits for a stream, or for all: what is enqueued afterwards comes after it."""
        for item in [stream] if stream is not None else self._streams:
            _join(self.host_clock, item.clock)

    def reset(self, omit: Callable[[str], bool] | None = None) -> None:
        """An idle device again, with nothing in its memory and no history: for one program after another."""
        assert self.order is None
        for flight in list(self.memory.flights):
            self.memory.land(flight)
        self.synchronise()
        self.memory = Memory(self.refuse)
        self.waits, self.issued, self.violations, self.omit = [], [], [], omit

    def refuse(self, error: AssertionError) -> None:
        """Raise, or note, what is wrong."""
        if self.order is not None and not self.order.raises:
            self.violations.append(error)
        else:
            raise error

    @contextmanager
    def forgetting_works(self) -> Iterator[None]:
        """Inside, ``Work.wait()`` does nothing."""
        self.forgets_works = True
        try:
            yield
        finally:
            self.forgets_works = False

    @contextmanager
    def stepping_aside(self) -> Iterator[None]:
        """Inside, operations are the device's own and not the program's."""
        self.aside += 1
        try:
            with _disable_current_modes():  # gloo's threads inherit modes from the thread that issues
                yield
        finally:
            self.aside -= 1


class StreamOrder(TorchDispatchMode):
    """Holds every operation inside against the order of the streams.

    ``serialised``: no two communicators may have collectives in flight at once. On leaving without
    an error, results that nobody waited for raise ``UnorderedAccess``, and the device is idle.

    ``raises=False`` notes in ``streams.violations`` instead, and lets the program go on as if it
    had waited: for wrong programs on several ranks, which would raise at different places and
    leave each other waiting.
    """

    def __init__(self, streams: FakeStreams, *, serialised: bool = False, raises: bool = True) -> None:
        super().__init__()
        self.raises = raises
        self._streams = streams
        self._reads = _HostReads(streams)
        self.serialised = serialised
        self.thread = get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler, for seconds, to keep it out of ``__torch_dispatch__``."""
        return False

    def __enter__(self) -> Self:
        assert self._streams.order is None, "a stream order is in force already"
        self._streams.order = self
        self._reads.install()
        return super().__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        super().__exit__(kind, error, traceback)
        self._reads.remove()
        streams = self._streams
        try:
            if kind is None:
                streams.memory.check_dropped()
                left = [flight for flight in streams.memory.flights if not streams.current_stream().is_behind(flight.access)]
                if left:
                    what = ", ".join(str(flight.access) for flight in left)
                    streams.refuse(UnorderedAccess(f"in flight at the end, and the current stream waited for none of it: {what}"))
                for flight in list(streams.memory.flights):
                    streams.memory.land(flight)
        finally:
            streams.order = None
            streams.synchronise()

    def __torch_dispatch__(  # torch's
        self,
        func: Any,
        types: Any,  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        streams, signature = self._streams, _signature(func)
        if streams.aside or signature.is_view:
            return func(*args, **kwargs)
        if signature.reads_value or (signature.indexes and _by_mask(args)):
            check_host_read(streams, signature.name)
        access = streams.current_stream().runs(signature.name)
        for tensor, write in _accesses(signature, args, kwargs):
            streams.memory.touch(access, tensor, write=write)
        results = func(*args, **kwargs)
        for tensor in _tensors(results):
            streams.memory.allocate(access, tensor)
        if signature.reads_value:
            streams.synchronise(streams.current_stream())
        return results


_HOST_READS = ("numpy", "tolist", "cpu", "__array__")
"""Methods of a tensor that hand its data to the host, and that are no operations."""


class _HostReads:
    """Methods in place of those, while a stream order is in force. A mode for functions does not reach into a backward."""

    def __init__(self, streams: FakeStreams) -> None:
        self._streams = streams
        self._originals = {name: getattr(torch.Tensor, name) for name in _HOST_READS}

    def install(self) -> None:
        """Put the checked methods in place."""
        for name, original in self._originals.items():
            setattr(torch.Tensor, name, self._checked(name, original))

    def remove(self) -> None:
        """Put torch's own back."""
        for name, original in self._originals.items():
            if name in torch._C.TensorBase.__dict__:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)

    def _checked(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        streams = self._streams

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if streams.ordered and not streams.aside:
                check_host_read(streams, f"Tensor.{name}")
                streams.memory.touch(streams.current_stream().runs(name), tensor, write=False)
                streams.synchronise(streams.current_stream())
            return original(tensor, *args, **kwargs)

        return method


def host_may_wait() -> bool:
    """Whether the caller runs inside ``host_reads``."""
    return MAY_WAIT.get()


def check_host_read(streams: FakeStreams, what: str) -> None:
    """Raise ``HostSynchronised`` if the host must not wait here."""
    if streams.ordered and not host_may_wait() and not is_optimizers_own():
        error = HostSynchronised(f"{what} at {call_site()} lets the host wait for the device inside a step")
        streams.refuse(error)


@dataclass(frozen=True, slots=True)
class _Signature:
    name: str
    is_view: bool
    reads_data: bool
    reads_value: bool
    indexes: bool
    writes: frozenset[int]
    written_names: frozenset[str]


_SHAPE_ONLY = {
    *("empty_like", "new_empty", "new_empty_strided", "zeros_like", "new_zeros", "ones_like", "new_ones"),
    *("full_like", "new_full", "rand_like", "randn_like", "is_same_size", "sym_size", "sym_numel", "sym_stride"),
}


@cache
def _signature(func: Any) -> _Signature:
    name = func._schema.name.removeprefix("aten::")
    arguments = func._schema.arguments
    written = {index for index, item in enumerate(arguments) if item.alias_info is not None and item.alias_info.is_write}
    aliases = any(item.alias_info is not None and not item.alias_info.is_write for item in (*arguments, *func._schema.returns))
    indexes = name in ("index", "index_put", "index_put_")
    value_tags = {torch.Tag.data_dependent_output, *(() if indexes else (torch.Tag.dynamic_output_shape,))}
    return _Signature(
        name=name,
        is_view=aliases and not written,
        reads_data=name not in _SHAPE_ONLY,
        reads_value=bool(value_tags & set(func.tags)),
        indexes=indexes,
        writes=frozenset(written),
        written_names=frozenset(arguments[index].name for index in written),
    )


def _accesses(signature: _Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[torch.Tensor, bool]]:
    """The tensors that an operation touches, and whether it writes them."""
    writes = signature.writes
    if signature.name.endswith("batch_norm") and len(args) > 5 and args[5] is True:
        writes |= {3, 4}  # running mean and variance, which the schema does not call written
    for index, value in enumerate(args):
        if index in writes or signature.reads_data:
            yield from ((tensor, index in writes) for tensor in _tensors(value))
    for name, value in kwargs.items():
        if name in signature.written_names or signature.reads_data:
            yield from ((tensor, name in signature.written_names) for tensor in _tensors(value))


def _by_mask(args: tuple[Any, ...]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The strided tensors in an argument."""
    if isinstance(value, torch.Tensor):
        if value.layout is torch.strided:
            yield value
        elif value.layout is torch.sparse_coo:
            yield value._indices()
            yield value._values()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for number, tick in other.items():
        if clock.get(number, 0) < tick:
            clock[number] = tick
