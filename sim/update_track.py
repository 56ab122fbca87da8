"""Update track: bucket updates that run beside a rank's compute, one behind the other."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from simpy import Event

from sim.clock import Clock


class UpdateTrack:
    """Runs updates in the order in which they are started, each when what it comes after has ended.

    ``ended`` is the event behind all of them, or none.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._busy: list[tuple[int, int]] = []
        self.ended: Event | None = None

    def start(self, took_ns: int, after: Sequence[Event]) -> None:
        """Start an update of ``took_ns``."""
        before = [*after, *([self.ended] if self.ended is not None else [])]
        self.ended = self._clock.process(self._run(took_ns, before))

    def take(self) -> list[tuple[int, int]]:
        """Starts and ends of the updates since the last call, once all have ended."""
        busy, self._busy, self.ended = self._busy, [], None
        return busy

    def _run(self, took_ns: int, before: Sequence[Event]) -> Generator[Event, object, None]:
        if before:
            yield self._clock.all_of(before)
        start_ns = self._clock.now
        yield self._clock.timeout(took_ns)
        self._busy.append((start_ns, self._clock.now))
