"""Traces of torch's profiler: for how long each rank's GPU computed in each step.

A folder has one trace a rank, as ``torch.profiler.tensorboard_trace_handler`` writes them. A kernel belongs to the step in which it was
launched. Communication is told from compute by the kernels' names, and a trainer that waits for others waits inside of a communication
kernel: names that are not known would make every rank look as slow as the slowest. So they are an error, and never "no stragglers".
"""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fleetbench.digests import reading
from fleetbench.errors import ConfigError

NCCL = r"^nccl.*Kernel"
"""Both ``ncclKernel_AllReduce...`` and ``ncclDevKernel_AllReduce...`` of newer versions; RCCL has the same names."""
_SUSPECT = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|send_?recv|cross_device", re.IGNORECASE)
_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_HINT = "record with ProfilerActivity.CUDA, a schedule, and profiler.step() in each step"


def trace_files(folder: Path) -> list[Path]:
    """The folder's traces; none where it is another kind of folder."""
    return [] if (folder / "experiment.toml").exists() else sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")])


def read_profiler_traces(folder: Path, communication: str = NCCL) -> pd.DataFrame:
    """A row a rank and step: ``rank``, ``step`` counted from 1, and ``compute_s``, for which any kernel but communication ran.

    ``communication`` is a regular expression of the kernels that communicate. Raises ``ConfigError`` for a trace without a rank, steps or
    kernels; where ranks are several and one has no kernel that is known to communicate; and for one that seems to and is not known.
    """
    tables: dict[int, pd.DataFrame] = {}
    for path in trace_files(folder):
        rank, events = _events(path)
        if rank in tables:
            raise ConfigError(f"a second trace of rank {rank}", str(path), hint="keep one trace of each rank in the folder")
        tables[rank] = _steps(events, path, re.compile(communication), several=len(trace_files(folder)) > 1).assign(rank=rank)
    return pd.concat(tables.values(), ignore_index=True)


def _events(path: Path) -> tuple[int, pd.DataFrame]:
    with reading(path, "a trace is JSON as torch.profiler writes it"):
        data = path.read_bytes()
        trace: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        rank = trace.get("distributedInfo", {}).get("rank")
        rows = [
            (event.get("cat", ""), str(event["name"]), event["ts"], event["dur"], event.get("args", {}).get("correlation", -1))
            for event in trace["traceEvents"]
            if event.get("ph") == "X"
        ]
    if rank is None:
        raise ConfigError("a trace that does not say its rank", str(path), hint='add "distributedInfo": {"rank": 0} to the file')
    return int(rank), pd.DataFrame(rows, columns=["cat", "name", "ts", "dur", "correlation"])


def _steps(events: pd.DataFrame, path: Path, communication: re.Pattern[str], *, several: bool) -> pd.DataFrame:
    steps = events[(events["cat"] == "user_annotation") & events["name"].str.match(_STEP)].sort_values("ts")
    kernels = events[events["cat"].isin(_ON_GPU)]
    for what, found in (("ProfilerStep", steps), ("GPU kernel", kernels)):
        if found.empty:
            raise ConfigError(f"a trace without a {what}", str(path), hint=_HINT)
    communicates = kernels["name"].str.contains(communication)
    compute = kernels[~communicates]
    unknown = compute[compute["name"].str.contains(_SUSPECT)]
    if not unknown.empty or (several and not communicates.any()):
        longest = (compute if unknown.empty else unknown).groupby("name")["dur"].sum().nlargest(3).index
        what = "no kernel that is known to communicate" if unknown.empty else "kernels that seem to communicate and are not known"
        hint = "name them: fit_stragglers(FOLDER, communication=REGULAR_EXPRESSION); waiting would count as compute"
        raise ConfigError(what, str(path), ", ".join(longest), hint)
    launches = events[events["cat"].isin(_LAUNCHES)].drop_duplicates("correlation").set_index("correlation")["ts"]
    launched = compute["correlation"].map(launches).fillna(compute["ts"]).to_numpy(dtype=float)
    place = np.searchsorted(steps["ts"].to_numpy(dtype=float), launched, side="right") - 1
    seconds = [_busy(compute[place == number]) for number in range(len(steps))]
    return pd.DataFrame({"step": range(1, len(steps) + 1), "compute_s": seconds})


def _busy(kernels: pd.DataFrame) -> float:
    """Seconds in which at least one of the kernels ran."""
    ordered = kernels.sort_values("ts")
    starts, ends = ordered["ts"].to_numpy(dtype=float), (ordered["ts"] + ordered["dur"]).to_numpy(dtype=float)
    latest = np.concatenate([[-np.inf], np.maximum.accumulate(ends)[:-1]]) if len(ends) else ends
    return float(np.clip(ends - np.maximum(starts, latest), 0, None).sum()) / 1e6
