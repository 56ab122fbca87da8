"""Merged timeline: two runs in one Chrome trace, one above the other, their step 1 at the same instant."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.result import RunResult
from fleetbench.timeline import Span, Track, on_tracks

STEP_1 = "step 1"


def write_merged_timeline(path: Path, runs: Mapping[str, RunResult]) -> None:
    """Write the runs' spans under their labels; a process is one rank of one run, a thread one of its tracks.

    Times start at the earliest warm-up. A name that ends in ``.gz`` is compressed; Perfetto opens both.
    Raises ``ConfigError`` for a run without spans, ``EnvironmentLacks`` where ``path`` cannot be written.
    """
    for label, run in runs.items():
        if not run.spans:
            raise ConfigError("the run keeps no timeline", label, hint="a run keeps one unless it was asked not to")
    begins = {label: _begin_of_step_1(run) for label, run in runs.items()}
    lead = max(0, *(begins[label] - min(span.start_ns for span in run.spans) for label, run in runs.items()))
    events: list[dict[str, object]] = []
    first_process = first_thread = 1
    for label, run in runs.items():
        placed = on_tracks(run.spans)
        tracks = sorted({track for track, _ in placed})
        threads = {track: thread for thread, track in enumerate(tracks, start=first_thread)}
        events += _events(label, placed, first_process, threads, lead - begins[label])
        instant = {"ph": "i", "s": "p", "pid": first_process + tracks[0][0], "tid": first_thread}
        events.append(instant | {"cat": label, "name": STEP_1, "ts": lead / 1000})
        first_process, first_thread = first_process + tracks[-1][0] + 1, first_thread + len(tracks)
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
    try:
        path.write_bytes(gzip.compress(text, compresslevel=6, mtime=0) if path.suffix == ".gz" else text)
    except OSError as error:
        raise EnvironmentLacks(f"the timeline cannot be written: {error.strerror}", str(path), hint="name another file") from None


def _begin_of_step_1(run: RunResult) -> int:
    """Nanoseconds on the run's clock at which the first rank begins step 1."""
    return round(float(run.steps.loc[run.steps["step"] >= 1, "start_s"].min()) * 1e9)


def _events(
    label: str, placed: Sequence[tuple[Track, Span]], first_process: int, threads: Mapping[Track, int], shift: int
) -> list[dict[str, object]]:
    events: list[dict[str, object]] = []
    for rank in sorted({rank for rank, *_ in threads}):
        process = first_process + rank
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{label}: rank {rank}"}})
        events.append({"ph": "M", "pid": process, "name": "process_labels", "args": {"labels": label}})
        events.append({"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}})
    events += [
        {"ph": "M", "pid": first_process + rank, "tid": thread, "name": "thread_name", "args": {"name": stream}}
        for (rank, stream, _), thread in threads.items()
    ]
    events += [
        {
            "ph": "X",
            "pid": first_process + span.rank,
            "tid": threads[track],
            "cat": label,
            "name": span.name,
            "ts": (span.start_ns + shift) / 1000,
            "dur": span.duration_ns / 1000,
        }
        for track, span in placed
    ]
    return events
