"""Traces of torch.profiler whose truth is known: hosts that launch, and devices that lag behind them."""

from __future__ import annotations

import dataclasses
import gzip
import json
import random
from pathlib import Path
from typing import Any

CUDA = {
    "launch": "cudaLaunchKernel",
    "graph": "cudaGraphLaunch",
    "communication": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    "compute": "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x16",
}
ROCM = {
    "launch": "hipExtModuleLaunchKernel",
    "graph": "hipGraphLaunch",
    "communication": "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)",
    "compute": "Cijk_Ailk_Bljk_SB_MT64x64x16_MI16x16x4x1",
}
BASE_US = 1_712_345_678_901_234
"""Microseconds since 1970: a float of this size knows quarters of a microsecond."""


@dataclasses.dataclass(kw_only=True)
class Device:
    """One rank's host and device, which runs what its streams are given in order, and nothing at once on one stream.

    ``lag`` steps wait in the device's queue: the host launches a step in a part of the time that the device takes for it.
    """

    rank: int
    lag: int
    words: dict[str, str] = dataclasses.field(default_factory=lambda: CUDA)
    graphs: bool = False
    events: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    truth: dict[int, tuple[set[int], set[int]]] = dataclasses.field(default_factory=dict)
    """Tenths of a microsecond in which the device computes, and communicates, by step."""
    correlation: int = 100
    free: dict[int, int] = dataclasses.field(default_factory=lambda: {7: 0, 13: 0, 20: 0})
    """When a stream has done what it was given, in tenths of a microsecond."""
    ahead: int = 0
    """How far the clock of the rank's host is ahead, in tenths of a microsecond."""

    def event(self, kind: str, name: str, begin: int, took: int, thread: int, **arguments: object) -> None:
        """An event of ``ph`` X; times in tenths of a microsecond."""
        begin += self.ahead
        times = {"ts": f"@{BASE_US + begin // 10}.{begin % 10}@", "dur": f"@{took // 10}.{took % 10}@"}
        pid = 0 if kind in ("kernel", "gpu_memcpy") else 1
        self.events.append({"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": thread, **times, "args": arguments})

    def step(self, number: int, begin: int, durations: list[tuple[int, int, bool]]) -> int:
        """The host's step: launches with no time between them and the step's begin and end; its end.

        ``durations``: of each kernel the stream, tenths of a microsecond and whether it communicates.
        """
        own = self.truth.setdefault(number, (set(), set()))
        host = begin
        for index, (stream, took, communicates) in enumerate(durations):
            is_first = index == 0 or not self.graphs
            if is_first:
                self.correlation += 1
                launch = self.words["graph" if self.graphs else "launch"]
                self.event("cuda_runtime", launch, host, 3, 1, correlation=self.correlation)
            start = max(host + 30, self.free[stream])  # a launch takes 3 us
            self.free[stream] = start + took
            name = self.words["communication" if communicates else "compute"]
            self.event("kernel", name, start, took, stream, correlation=self.correlation, stream=stream)
            own[communicates].update(range(start, start + took))
            host += sum(part for other, part, _ in durations if other == 7) // (len(durations) * (self.lag + 1))
        if self.lag == 0:
            host = max(host, *self.free.values())  # the host reads a loss
        self.event("user_annotation", f"ProfilerStep#{number}", begin, host - begin, 1)
        return host

    def write(self, path: Path, *, knows_rank: bool = True) -> Path:
        """The trace as torch writes it, compressed if the name says so; events in any order."""
        random.Random(self.rank).shuffle(self.events)  # noqa: S311  # no secret
        data: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0}],
            "traceEvents": self.events,
        }
        if knows_rank:
            data["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": 2}
        text = json.dumps(data).replace('"@', "").replace('@"', "")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    def run(self, steps: range, seed: int, begin: int = 0) -> int:
        """Steps of kernels on two compute streams and one of communication; the end on the host."""
        draw = random.Random(seed)  # noqa: S311  # no secret
        for number in steps:
            kernels = [(7, draw.randrange(200, 900), False) for _ in range(6)]
            kernels += [(20, draw.randrange(100, 400), False) for _ in range(2)]
            kernels += [(13, draw.randrange(300, 1200), True) for _ in range(3)]
            draw.shuffle(kernels)
            begin = self.step(number, begin, kernels)
        return begin
