"""Traces of torch's profiler are read as compute times, and what is not known in them is an error."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fleetbench.errors import ConfigError
from fleetbench.fitting.profiler_traces import read_profiler_traces
from fleetbench.fitting.stragglers import fit_source

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def write(folder: Path, rank: int | None, kernels_us: list[list[tuple[str, float, float]]], step_us: float = 1000.0) -> None:
    """A rank's trace: for each step its kernels with name, start after the step's, and length; launched 5 us before they start."""
    events: list[dict[str, Any]] = []
    number = 0
    for step, kernels in enumerate(kernels_us):
        begin = 1e6 + step * step_us
        events.append({"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step + 16}", "ts": begin, "dur": step_us, "args": {}})
        for name, start, length in kernels:
            number += 1
            where = {"correlation": number}
            launch = max(begin + start - 5, begin)
            events.append({"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launch, "dur": 2, "args": where})
            events.append({"ph": "X", "cat": "kernel", "name": name, "ts": begin + start, "dur": length, "args": {"stream": 7, **where}})
    events.append({"ph": "M", "name": "process_name", "args": {"name": "python"}})
    folder.mkdir(exist_ok=True)
    info = {} if rank is None else {"distributedInfo": {"backend": "nccl", "rank": rank}}
    (folder / f"worker{rank}.pt.trace.json.gz").write_bytes(gzip.compress(json.dumps({**info, "traceEvents": events}).encode()))


def steps(slow: float, communication: str = ALL_REDUCE) -> list[list[tuple[str, float, float]]]:
    """Forty steps: two kernels that overlap by 50 us, and communication that lasts until all are there."""
    one = [("gemm", 0.0, 200.0 * slow), ("relu", 200.0 * slow - 50, 100.0), (communication, 300.0 * slow, 600 - 300 * slow)]
    return [one] * 40


def test_compute_is_the_time_in_which_a_kernel_other_than_communication_runs(tmp_path: Path) -> None:
    """Overlapping kernels count once; a kernel that runs into the next step belongs to the one in which it was launched."""
    late = [[("gemm", 990.0, 100.0)], [("gemm", 200.0, 30.0)]]
    write(tmp_path, 0, late)
    assert read_profiler_traces(tmp_path)["compute_s"].tolist() == pytest.approx([100e-6, 30e-6])
    write(tmp_path, 0, steps(1.0)[:2])
    assert read_profiler_traces(tmp_path)["compute_s"].tolist() == pytest.approx([250e-6] * 2)


def test_a_slow_rank_is_named(tmp_path: Path) -> None:
    """Rank 1 computes 1.44 times as long, while every rank is busy for the same time, because the others wait in their communication."""
    for rank, slow in enumerate((1.0, 1.55, 1.0)):
        write(tmp_path, rank, steps(slow))
    fit = fit_source(tmp_path)
    assert fit.rank_factors == pytest.approx((1.0, 1.44, 1.0), abs=0.01)


@pytest.mark.parametrize(
    ("name", "what"), [("my_fancy_exchange", "no kernel that is known"), ("vllm::cross_device_reduce_2stage", "seem to")]
)
def test_unknown_communication_is_an_error_and_never_no_stragglers(name: str, what: str, tmp_path: Path) -> None:
    """Kernels that wait for others would count as compute, and every rank would look as slow; a pattern makes them known."""
    for rank, slow in enumerate((1.0, 1.55)):
        write(tmp_path, rank, steps(slow, communication=name))
    with pytest.raises(ConfigError, match=what) as error:
        fit_source(tmp_path)
    assert name in str(error.value)
    assert fit_source(tmp_path, communication=name).rank_factors == pytest.approx((1.0, 1.44), abs=0.01)


def test_a_trace_without_what_is_needed_is_refused(tmp_path: Path) -> None:
    """Neither rank, nor steps, nor kernels are made up; two traces of one rank are not added."""
    write(tmp_path / "a", None, steps(1.0)[:1])
    with pytest.raises(ConfigError, match="does not say its rank"):
        read_profiler_traces(tmp_path / "a")
    write(tmp_path / "b", 0, [])
    with pytest.raises(ConfigError, match="without a ProfilerStep"):
        read_profiler_traces(tmp_path / "b")
    write(tmp_path / "c", 0, [[]])
    with pytest.raises(ConfigError, match="without a GPU kernel"):
        read_profiler_traces(tmp_path / "c")
    write(tmp_path / "d", 0, steps(1.0)[:1])
    (tmp_path / "d" / "again.json").write_bytes(gzip.decompress((tmp_path / "d" / "worker0.pt.trace.json.gz").read_bytes()))
    with pytest.raises(ConfigError, match="a second trace of rank 0"):
        read_profiler_traces(tmp_path / "d")
