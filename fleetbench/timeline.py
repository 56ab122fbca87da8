"""Timeline: what every rank did when, as a Chrome trace that Perfetto opens."""

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMPUTE = "compute"
COMMUNICATION = "communication"
HOST = "host"
TIMELINE_FILE = "timeline.json.gz"
MOST_EVENTS = 1_000_000
"""Spans of one timeline. More are not written, and ``skipped`` says so: Perfetto takes minutes, and the file gigabytes."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span on one track.

    Names are the same in every executor: ``forward``, ``backward``, ``wait``, ``update``,
    ``merge``, ``all_reduce 3`` (the bucket), and, on a track of its own because it lies within the
    backward, ``start 3`` for what bucket 3 takes from it as it becomes ready.
    """

    rank: int
    stream: str
    """``compute``, ``communication``, with the communicator's number after it where there are several, ``update`` or ``host``."""
    name: str
    start_ns: int
    duration_ns: int


def start_name(bucket: int) -> str:
    """The name of the span in which a bucket is packed and its collective started, or what else is done as it becomes ready."""
    return f"start {bucket}"


Track = tuple[int, str, int]
"""A rank, a stream, and a row of it."""


def on_tracks(spans: Iterable[Span]) -> list[tuple[Track, Span]]:
    """The spans in order, each with where it is drawn.

    Collectives of one stream that are under way together have rows of their own; spans of other streams lie
    within each other at most, and share one.
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
    """The spans that ``write_timeline`` wrote, rounded to nanoseconds."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    streams = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    return tuple(
        Span(event["pid"], streams[event["pid"], event["tid"]], event["name"], round(event["ts"] * 1000), round(event["dur"] * 1000))
        for event in events
        if event["ph"] == "X"
    )


def write_timeline(path: Path, spans: Iterable[Span]) -> None:
    """Write a Chrome trace, compressed: a process a rank, a thread a track. Equal spans give equal bytes."""
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


Step = tuple[int, int, int, int]
"""A rank, its step, and when that begins and ends, in ns."""


def write_rank_traces(folder: Path, spans: Iterable[Span], steps: Iterable[Step]) -> None:
    """Write a trace a rank, ``rank_0.json.gz`` and so on, as torch's profiler does on GPUs: what Holistic Trace Analysis reads.

    Compute, updates and collectives are kernels, each with its launch and its stream; collectives are called as NCCL's kernels are,
    by which that library knows them; steps are annotations. Waiting is no kernel. ``folder`` is made where it is missing.
    """
    events: dict[int, list[dict[str, Any]]] = {}
    for rank, step, start_ns, end_ns in steps:
        span = Span(rank, HOST, f"ProfilerStep#{step}", start_ns, end_ns - start_ns)
        events.setdefault(rank, []).append(_event(span, "user_annotation", thread=1))
    streams: dict[tuple[str, int], int] = {}
    for number, ((rank, stream, row), span) in enumerate(on_tracks(spans), start=1):
        if span.name == "wait" or span.name.startswith("start "):
            continue
        kind, _, bucket = span.name.partition(" ")
        name = f"ncclKernel_{kind}_{bucket}" if stream.startswith(COMMUNICATION) else span.name
        place = streams.setdefault((stream, row), len(streams) + 1)
        launch = Span(rank, HOST, "cudaLaunchKernel", span.start_ns, 0)
        events.setdefault(rank, []).extend(
            [
                _event(launch, "cuda_runtime", thread=1, correlation=number),
                _event(Span(rank, stream, name, span.start_ns, span.duration_ns), "kernel", thread=place, stream=place, correlation=number),
            ]
        )
    folder.mkdir(parents=True, exist_ok=True)
    for rank, own in events.items():
        text = json.dumps({"schemaVersion": 1, "distributedInfo": {"rank": rank}, "traceEvents": own}).encode()
        (folder / f"rank_{rank}.json.gz").write_bytes(gzip.compress(text, compresslevel=6, mtime=0))


def _event(span: Span, category: str, *, thread: int, **arguments: int) -> dict[str, Any]:
    where = {"ph": "X", "cat": category, "pid": span.rank, "tid": thread, "name": span.name}
    return where | {"ts": span.start_ns / 1000, "dur": span.duration_ns / 1000, "args": arguments}
