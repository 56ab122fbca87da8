"""Stopwatch: where a rank's steps went, on the host's monotonic clock."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fleetbench.plan.operations import Operation
from fleetbench.result import StepRecord


@dataclass(slots=True)
class _Step:
    """The step under way; times in ns, none before their moment has come."""

    step: int
    start: int
    forward_end: int | None = None
    backward_end: int | None = None
    arrival: int | None = None
    stall: int = 0
    update: int = 0
    local_steps: int | None = None
    loss: float | None = None
    bytes_sent: int = 0
    paused: int = 0


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A finished step: its record on the raw clock, and the time in it that does not count."""

    record: StepRecord
    paused_ns: int


@dataclass(frozen=True, slots=True)
class TimedSpan:
    """A stretch of a step, on the compute stream or, for a collective, on that of its communicator."""

    step: int
    name: str
    start_ns: int
    end_ns: int
    communicator: int | None = None


@dataclass(slots=True)
class Stopwatch:
    """Keeps one record a step.

    ``begin_step`` closes the step before; ``finish`` closes the last one. The other methods are
    called in the order of a step: forward, backward, stall, update, and with Local SGD the stall
    behind the update.
    """

    rank: int
    keep: bool = True
    """Off in a user's own training, which may run for weeks: nothing is remembered."""
    steps: list[TimedStep] = field(default_factory=list)
    spans: list[TimedSpan] = field(default_factory=list)
    _current: _Step | None = None
    _mark: int = 0
    _local: str = "update"

    def begin_step(self, step: int) -> None:
        """The forward of ``step`` starts, and the step before ends."""
        now = time.monotonic_ns()
        self._close(now)
        self._current = _Step(step, now)

    def finish(self) -> None:
        """The last step ends."""
        self._close(time.monotonic_ns())
        self._current = None

    def forward_ends(self) -> None:
        """The model's output is there."""
        step = self._step()
        step.forward_end = time.monotonic_ns()
        self._span("forward", step.start, step.forward_end)

    def backward_ends(self) -> None:
        """The last gradient is there."""
        step = self._step()
        step.backward_end = self._mark = time.monotonic_ns()
        if step.forward_end is not None:
            self._span("backward", step.forward_end, step.backward_end)

    def arrives(self) -> None:
        """The rank is ready for what is, so far, the step's last collective."""
        self._step().arrival = time.monotonic_ns()

    def stall_begins(self) -> None:
        """A stall starts behind the update: what lies between belongs to the update."""
        now = time.monotonic_ns()
        step = self._step()
        step.update += now - self._mark
        self._span(self._local, self._mark, now)
        step.arrival = self._mark = now
        self._local = "merge"

    def stall_ends(self) -> None:
        """The last collective has ended."""
        now = time.monotonic_ns()
        self._step().stall += now - self._mark
        self._span("wait", self._mark, now)
        self._mark = now

    def update_begins(self) -> None:
        """The optimizer starts."""
        self._mark = time.monotonic_ns()
        self._local = "update"

    def update_ends(self) -> None:
        """The parameters are those of the next step."""
        now = time.monotonic_ns()
        self._step().update += now - self._mark
        self._span(self._local, self._mark, now)

    def closes_round(self, local_steps: int) -> None:
        """The step ends a round of so many steps."""
        self._step().local_steps = local_steps

    def sends(self, nbytes: int) -> None:
        """A collective was started that sends so many bytes."""
        self._step().bytes_sent += nbytes

    def loss(self, value: float) -> None:
        """The step's loss on this rank."""
        self._step().loss = value

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens inside does not count."""
        begin = time.monotonic_ns()
        yield
        self._step().paused += time.monotonic_ns() - begin

    @contextmanager
    def collective(self, operation: Operation, step: int) -> Iterator[None]:
        """Times one collective; runs on its lane."""
        begin = time.monotonic_ns()
        yield
        name = f"{operation.kind} {operation.bucket}"
        if self.keep:
            self.spans.append(TimedSpan(step, name, begin, time.monotonic_ns(), operation.communicator))

    def _span(self, name: str, start_ns: int, end_ns: int) -> None:
        if self.keep:
            self.spans.append(TimedSpan(self._step().step, name, start_ns, end_ns))

    def _step(self) -> _Step:
        assert self._current is not None
        return self._current

    def _close(self, now: int) -> None:
        step = self._current
        if not self.keep or step is None or step.forward_end is None or step.backward_end is None:
            return
        record = StepRecord(
            rank=self.rank,
            step=step.step,
            start_ns=step.start,
            forward_ns=step.forward_end - step.start,
            backward_ns=step.backward_end - step.forward_end,
            stall_ns=step.stall,
            update_ns=step.update,
            end_ns=now,
            arrival_ns=step.arrival,
            local_steps=step.local_steps,
            loss=step.loss,
            bytes_sent=step.bytes_sent,
        )
        self.steps.append(TimedStep(record, step.paused))


def encode_steps(stopwatch: Stopwatch) -> dict[str, list[dict[str, object]]]:
    """Plain data, for a worker's part file."""
    return {
        "steps": [dataclasses.asdict(step) for step in stopwatch.steps],
        "spans": [dataclasses.asdict(span) for span in stopwatch.spans],
    }
