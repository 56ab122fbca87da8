"""Timeline: what every rank did when, as a Chrome trace that Perfetto opens."""

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetbench.digests import reading

COMPUTE = "compute"
COMMUNICATION = "communication"
HOST = "host"
TIMELINE_FILE = "timeline.json.gz"
MOST_EVENTS = 1_000_000
"""Largest number of spans in a timeline. Longer timelines are not written, and ``skipped`` says so, because
Perfetto would take minutes and the file gigabytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """Span of time on one track.

    Names are the same in every executor: ``forward``, ``backward``, ``wait``, ``update``, ``merge`` and
    ``all_reduce 3`` (the bucket). ``start 3``, the part of the backward that starts bucket 3, lies within the
    backward and so has its own track.
    """

    rank: int
    """Rank of the track."""
    stream: str
    """Stream of the track: ``compute``, ``communication`` (with the communicator's number if there are
    several), ``update`` or ``host``."""
    name: str
    start_ns: int
    """Start in ns on rank 0's clock."""
    duration_ns: int
    """Length in ns."""


def start_name(bucket: int) -> str:
    """Return the name of the span in which a bucket is packed and its collective started."""
    return f"start {bucket}"


Track = tuple[int, str, int]
"""A rank, a stream, and a row within the stream."""


def on_tracks(spans: Iterable[Span]) -> list[tuple[Track, Span]]:
    """Return the spans sorted by rank, stream and start, each with its track.

    Overlapping spans of a communication stream get different rows. All spans of another stream are in row 0,
    where they overlap only by nesting.
    """
    ends: dict[tuple[int, str], list[int]] = {}
    placed = []
    for span in sorted(spans, key=lambda span: (span.rank, span.stream, span.start_ns, span.name)):
        taken = ends.setdefault((span.rank, span.stream), [])
        overlaps = span.stream.startswith(COMMUNICATION)
        row = next((row for row, end_ns in enumerate(taken) if end_ns <= span.start_ns or not overlaps), len(taken))
        taken[row : row + 1] = [span.start_ns + span.duration_ns]
        placed.append(((span.rank, span.stream, row), span))
    return placed


def read_timeline(path: Path) -> tuple[Span, ...]:
    """Return the spans that ``write_timeline`` wrote, rounded to nanoseconds.

    Raises ``ConfigError`` for other files.
    """
    with reading(path, "run the experiment again"):
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        streams = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
        return tuple(
            Span(event["pid"], streams[event["pid"], event["tid"]], event["name"], round(event["ts"] * 1000), round(event["dur"] * 1000))
            for event in events
            if event["ph"] == "X"
        )


def write_timeline(path: Path, spans: Iterable[Span]) -> None:
    """Write a compressed Chrome trace: a process per rank, a thread per track. Output is deterministic."""
    placed = on_tracks(spans)
    threads = {track: thread for thread, track in enumerate(sorted({track for track, _ in placed}))}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        for rank in sorted({rank for rank, *_ in threads})
    ]
    events += [
        {"ph": "M", "pid": rank, "tid": thread, "name": "thread_name", "args": {"name": stream}}
        for (rank, stream, _), thread in threads.items()
    ]
    events += [
        {"ph": "X", "pid": span.rank, "tid": threads[track], "name": span.name, "ts": span.start_ns / 1000, "dur": span.duration_ns / 1000}
        for track, span in placed
    ]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, compresslevel=6, mtime=0))
