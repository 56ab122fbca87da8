"""Traces that other projects publish: what ``fleetbench why`` says of each, beside what is known of it otherwise.

python reports/why/traces.py FOLDER        # holds OWNER/REPOSITORY/PATH; adds to traces.csv what it lacks

Files of one folder whose names differ only by numbers of ranks, workers or times are one run. Two checks share
no code with fleetbench. Each kernel is given to the step that its launch lies in, by its correlation alone, and
the union of a step's kernels is compared with ``read_profiler``. And the device's busy time, from the first
step's begin to the last step's end, is compared with the shares; TraceLens publishes it for whole traces.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
import json
import math
import re
import sys
import tempfile
import traceback
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any

from fleetbench.cli.main import main as fleetbench
from fleetbench.profiler_traces import read_profiler

HERE = Path(__file__).parent
COLUMNS = (
    "repository",
    "path",
    "files",
    "device",
    "ranks",
    "steps",
    "outcome",
    "step_ms",
    "first_cause",
    "says",
    "host_step_ms",
    "rank_steps_that_agree",
    "busy_ms",
    "busy_checked_ms",
    "busy_published_ms",
)
BUSY = ("device", "optimizer", "gradients", "buffers", "collective")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset")
Intervals = list[tuple[int, int]]


def main() -> None:
    """Look at each run that the table lacks, the smallest first."""
    folder, table = Path(sys.argv[1]), HERE / "traces.csv"
    rows = list(csv.DictReader(table.open(encoding="utf-8"))) if table.exists() else []
    known = {(row["repository"], row["path"]) for row in rows}
    with table.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        if not rows:
            writer.writeheader()
        for files in sorted(runs(folder), key=lambda files: sum(map(size, files))):
            owner, repository, *path = (files[0].parent if files[1:] else files[0]).relative_to(folder).parts
            name = {"repository": f"{owner}/{repository}", "path": "/".join(path)}
            if tuple(name.values()) not in known:
                writer.writerow(name | look(files))
                file.flush()


def runs(folder: Path) -> list[list[Path]]:
    """Files by run, without those whose content a larger run has."""
    found: dict[tuple[Path, str], list[Path]] = defaultdict(list)
    for path in sorted(path for path in folder.rglob("*") if path.name.endswith((".json", ".json.gz"))):
        found[path.parent, re.sub(r"\d+", "#", path.name) if re.search("rank|worker", path.name) else path.name].append(path)
    seen: set[bytes] = set()
    kept = []
    for files in sorted(found.values(), key=len, reverse=True):
        digests = {hashlib.sha256(path.read_bytes()).digest() for path in files}
        if digests - seen:
            kept.append(files)
        seen |= digests
    return kept


def size(path: Path) -> int:
    """Bytes of JSON."""
    return int.from_bytes(path.read_bytes()[-4:], "little") if path.suffix == ".gz" else path.stat().st_size


def look(files: list[Path]) -> dict[str, Any]:
    """What is said of a run, and what is known of it."""
    traces = [events_of(path) for path in files]
    names = " ".join({str(event.get("name")) for events, _ in traces for event in events if "runtime" in kind(event)})
    kernels = any(kind(event) == "kernel" for events, _ in traces for event in events)
    device = ("ROCm" if "hip" in names else "CUDA") if kernels or re.search("cuda|hip", names) else "CPU"
    if any(kind(event).startswith("mtia") for events, _ in traces for event in events):
        device = "MTIA"
    row: dict[str, Any] = {"files": len(files), "device": device if any(events for events, _ in traces) else ""}
    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as runs_folder, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = fleetbench(["why", "--json", "--out", runs_folder, *map(str, files)])
        except Exception:  # noqa: BLE001  # a defect, which the table shows
            return row | {"outcome": "failed", "says": traceback.format_exc().splitlines()[-1]}
    if code:
        said = re.sub(rf"{re.escape(str(files[0].parent))}/?", "", err.getvalue())
        return row | {"outcome": "refused", "says": " ".join(said.split())}
    answer = json.loads(out.getvalue())
    cause = (answer["causes"] or [{"name": "none", "what": ""}])[0]
    row |= {"ranks": len({rank for _, rank in traces}), "steps": answer["steps"], "outcome": "read"}
    row |= {"step_ms": f"{answer['step_s'] * 1e3:.4f}", "first_cause": cause["name"], "says": cause["what"]}
    host = [end - begin for events, _ in traces for begin, end, _ in steps_of(events)]
    row["host_step_ms"] = f"{sum(host) / len(host) * 1e-6:.4f}"
    if kernels:
        row["rank_steps_that_agree"] = agreement(files, traces)
        if len(files) == 1 and len(host) == answer["steps"]:
            busy = sum(share["seconds"] for share in answer["shares"] if share["kind"] in BUSY)
            row["busy_ms"] = f"{busy * answer['steps'] * 1e3:.4f}"
            row["busy_checked_ms"] = f"{busy_ns(traces[0][0]) * 1e-6:.4f}"
            row["busy_published_ms"] = published(files[0])
    return row


def agreement(files: list[Path], traces: list[tuple[list[dict[str, Any]], int]]) -> str:
    """Number of steps of ranks for which compute and communication agree to the nanosecond, and of all."""
    times: dict[tuple[int, int], tuple[int, int]] = {}
    for events, rank in traces:
        own: dict[int, tuple[Intervals, Intervals]] = defaultdict(lambda: ([], []))
        for event, step in launched(events):
            own[step]["nccl" in event["name"].lower()].append(interval(event))
        times |= {(rank, step): (union(parts[0]), union(parts[1])) for step, parts in own.items()}
    places = {rank: place for place, rank in enumerate(sorted({rank for _, rank in traces}))}
    checked = {(places[rank], step): part for (rank, step), part in times.items()}
    table = read_profiler(files, "FILE")[0].to_dict("records")
    same = [
        checked.get((row["rank"], row["step"])) == (round(row["compute_s"] * 1e9), round(row["communication_s"] * 1e9)) for row in table
    ]
    return f"{sum(same)} of {len(same)}"


def launched(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int]]:
    """Kernels, each with the step in which its launch lies."""
    steps = steps_of(events)
    launches = {e["args"]["correlation"]: ns(e["ts"]) for e in events if is_launch(e)}
    found = []
    for event in (event for event in events if kind(event) == "kernel"):
        when = launches.get(event["args"].get("correlation"), -1)
        found += [(event, step) for begin, end, step in steps if begin <= when < end]
    return found


def is_launch(event: dict[str, Any]) -> bool:
    """Whether it is a call of the device's runtime or driver, with a correlation."""
    return ("runtime" in kind(event) or "driver" in kind(event)) and "correlation" in event.get("args", {})


def busy_ns(events: list[dict[str, Any]]) -> int:
    """Nanoseconds in which the device runs kernels or copies from the first step's begin to the last one's end.

    The device begins the first step when it has run what was launched before: the kernels that each stream runs
    before the first one that is launched in a step.
    """
    steps, first, own = steps_of(events), dict[Any, int](), [event for event, _ in launched(events)]
    for event in sorted(own, key=interval, reverse=True):
        first[event["tid"]] = interval(event)[0]
    before = [interval(event) for event in events if kind(event) == "kernel" and interval(event)[0] < first.get(event["tid"], math.inf)]
    begin = max([min(steps)[0], *(end for _, end in before)])
    end = max([step[1] for step in steps] + [interval(event)[1] for event in own])
    work = [interval(event) for event in events if kind(event) in ON_DEVICE]
    return union([(max(first, begin), min(last, end)) for first, last in work])


def published(path: Path) -> str:
    """Busy milliseconds of the whole trace, as TraceLens publishes them beside it."""
    for file in (path.parent / name / "gpu_timeline.csv" for name in (f"{path.name.split('.json')[0]}_perf_report_csvs", "perf_csvs")):
        if file.exists():
            return f"{float(dict(row[:2] for row in csv.reader(file.open(encoding='utf-8')))['busy_time']):.4f}"
    return ""


def steps_of(events: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Begin, end and number of the host's steps."""
    named = (event for event in events if str(event.get("name")).startswith("ProfilerStep") and kind(event) != "gpu_user_annotation")
    return [(*interval(event), int(event["name"].strip("ProfilerStep#* "))) for event in named]  # noqa: B005  # no digits


def events_of(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Events with a duration, and the rank; no events of what is no trace. Numbers that are no integers stay text."""
    raw = path.read_bytes()
    try:
        data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw, parse_float=str)
        events = [event for event in data["traceEvents"] if event.get("ph") == "X"]
    except (ValueError, KeyError, TypeError):
        return [], 0
    return events, (data.get("distributedInfo") or {}).get("rank") or 0


def kind(event: dict[str, Any]) -> str:
    """Category, in small letters: they changed with torch 1.12."""
    return str(event.get("cat")).lower()


def interval(event: dict[str, Any]) -> tuple[int, int]:
    """Begin and end in ns."""
    return ns(event["ts"]), ns(event["ts"]) + ns(event.get("dur", 0))


def ns(microseconds: str | int) -> int:
    """Whole nanoseconds."""
    return int(Decimal(microseconds) * 1000)


def union(intervals: Intervals) -> int:
    """Nanoseconds that any of the intervals holds."""
    total, reached = 0, -1
    for begin, end in sorted(intervals):
        total += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return total


if __name__ == "__main__":
    main()
