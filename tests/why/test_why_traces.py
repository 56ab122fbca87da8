"""Shares of a step from traces of torch.profiler, made so that it is known where their time goes."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import run_python
from profiled_devices import CUDA, ROCM, Device

from fleetbench.errors import ConfigError
from fleetbench.report.why import text_of
from fleetbench.why.shares import Kind, Share, Shares
from fleetbench.why.traces import TraceShares, projected, read_shares
from tuner.why.from_traces import explain_traces

MS = 10_000
"""Tenths of a microsecond."""
COMPUTE, COMMUNICATION = 7, 13
"""Streams."""
WITH_BUFFERS = CUDA | {"buffers": "ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)"}
ITEM = {CUDA["launch"]: "cudaStreamSynchronize", ROCM["launch"]: "hipMemcpyWithStream"}


@dataclasses.dataclass(kw_only=True)
class Rank(Device):
    """One rank, whose host does one thing after the other; ``now``: its time, in tenths of a microsecond."""

    lag: int = 0
    now: int = 0
    begun: int = 0

    def computes(self, took: int, host: int = 30, name: str | None = None) -> None:
        """Launch a kernel, which takes the host ``host``."""
        start = max(self.now + 30, self.free[COMPUTE])
        self._launch("kernel", name or self.words["compute"], start, took, COMPUTE, host)

    def ready(self) -> int:
        """When a collective that is launched now begins: after all compute so far."""
        return max(self.now + 30, self.free[COMPUTE], self.free[COMMUNICATION])

    def reduces(self, end: int, name: str = "communication", **says: object) -> None:
        """Launch a collective that all ranks end at ``end``; what is computed next needs its result."""
        start = self.ready()
        self._launch("kernel", self.words[name], start, end - start, COMMUNICATION, 30, **says)
        self.free[COMPUTE] = end

    def reads(self, name: str = "aten::item") -> None:
        """Wait for the device, as ``loss.item()`` does."""
        begin = self.now
        self._launch(
            "gpu_memcpy",
            "Memcpy DtoH (Device -> Pageable)",
            max(begin + 30, self.free[COMPUTE]),
            20,
            COMPUTE,
            30,
        )
        end = self.free[COMPUTE] + 50
        self.event(
            "cuda_runtime",
            ITEM[self.words["launch"]],
            self.now,
            end - self.now,
            1,
            correlation=10**6 + self.correlation,
        )
        self.event("cpu_op", "aten::_local_scalar_dense", begin, end - begin, 1)
        self.event("cpu_op", name, begin, end + 10 - begin, 1)
        self.now = end + 10

    def loads(self, took: int) -> None:
        """The next batch."""
        self.event(
            "user_annotation",
            "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
            self.now,
            took,
            1,
        )
        self.now += took

    def ends(self, number: int) -> None:
        """End the step ``number``."""
        self.event("user_annotation", f"ProfilerStep#{number}", self.begun, self.now - self.begun, 1)
        self.begun = self.now

    def _launch(self, kind: str, name: str, start: int, took: int, stream: int, host: int, **says: object) -> None:
        self.correlation += 1
        self.event("cuda_runtime", self.words["launch"], self.now, host, 1, correlation=self.correlation)
        self.event(kind, name, start, took, stream, correlation=self.correlation, stream=stream, **says)
        self.free[stream] = start + took
        self.now += host


def all_reduce(ranks: Sequence[Rank], took: int) -> None:
    """A collective moves data when the last rank has begun it."""
    end = max(rank.ready() for rank in ranks) + took
    for rank in ranks:
        rank.reduces(end)


def read(ranks: Sequence[Rank], folder: Path) -> TraceShares:
    """What is found in the ranks' traces."""
    for rank in ranks:
        rank.write(folder / f"rank{rank.rank}.pt.trace.json.gz")
    found = read_shares([folder], "TRACE")
    assert sum(share.seconds for share in found.shares.shares) == pytest.approx(found.shares.step_s, rel=1e-12)
    return found


def ms(shares: Shares, *kinds: Kind, waits: bool = False) -> float:
    """Milliseconds per step."""
    return 1e3 * sum(one.seconds for one in shares.shares if one.kind in kinds and (one.rank is not None) is waits)


WORDS = pytest.mark.parametrize("words", [CUDA, ROCM], ids=["CUDA", "ROCm"])


@WORDS
def test_a_device_that_lags_is_never_idle(words: dict[str, str], tmp_path: Path) -> None:
    """The host launches a step in a tenth of its time: 10 ms of compute, and 2 ms of exposed all-reduce."""
    rank = Rank(rank=0, words=words)
    for step in range(20):
        for _ in range(10):
            rank.computes(MS)
        rank.reduces(rank.ready() + 2 * MS)
        rank.now += MS // 2
        rank.ends(step)
    shares = read([rank], tmp_path).shares
    assert (shares.num_steps, shares.num_ranks) == (20, 1)
    assert shares.step_s * 1e3 == pytest.approx(12, rel=1e-3)
    assert ms(shares, "device") == pytest.approx(10, rel=1e-3)
    assert ms(shares, "gradients") == pytest.approx(2, rel=1e-3)
    assert ms(shares, "idle") < 0.001


@pytest.mark.parametrize("lag", range(5))
def test_shares_add_up_whatever_overlaps(lag: int, tmp_path: Path) -> None:
    """Kernels of three streams in any order; hidden and exposed are all communication there is."""
    device = Device(rank=0, lag=lag)
    device.run(range(10), seed=lag)
    path = device.write(tmp_path / "t.json")
    found = read_shares([path], "TRACE")
    compute, communication = (set().union(*(own[part] for own in device.truth.values())) for part in (0, 1))
    assert found.shares.of("device") * 10 == pytest.approx(len(compute) * 1e-7)
    assert found.shares.of("gradients") * 10 == pytest.approx(len(communication - compute) * 1e-7)
    assert found.hidden_s * 10 == pytest.approx(len(communication & compute) * 1e-7)
    assert sum(share.seconds for share in found.shares.shares) == pytest.approx(found.shares.step_s, rel=1e-12)


@WORDS
def test_a_planted_item_is_named(words: dict[str, str], tmp_path: Path) -> None:
    """The device is idle for 3 ms after each ``loss.item()``: the host launches nothing before it is done."""
    rank = Rank(rank=0, words=words)
    for step in range(10):
        begin = rank.now
        rank.computes(8 * MS)
        rank.reads()
        rank.now += 3 * MS
        rank.event("python_function", "train.py(31): train_step", begin, rank.now - begin, 1)
        rank.event("python_function", "torch/_tensor.py(40): wrapped", begin + 10, rank.now - begin - 20, 1)
        rank.ends(step)
    found = read([rank], tmp_path)
    assert ms(found.shares, "idle") == pytest.approx(3, rel=0.02)
    assert ms(found.shares, "device") == pytest.approx(8, rel=0.02)
    (wait,) = found.host_waits
    assert (wait.operator, wait.caller) == ("aten::item", "train.py(31): train_step")
    assert wait.idle_s * 1e3 == pytest.approx(3, rel=0.02)
    assert wait.per_step == pytest.approx(1)


def test_a_launch_bound_step_is_idle_between_kernels(tmp_path: Path) -> None:
    """A launch takes 50 us and its kernel 10: four fifths of the step are idle."""
    rank = Rank(rank=0)
    for step in range(10):
        for _ in range(200):
            rank.computes(100, host=500)
        rank.ends(step)
    found = read([rank], tmp_path)
    assert ms(found.shares, "idle") == pytest.approx(8, rel=0.01)
    assert ms(found.shares, "device") == pytest.approx(2, rel=0.01)
    assert found.host_waits == ()


def test_a_slow_loader_is_input(tmp_path: Path) -> None:
    """The device waits for the next batch: of the loader's 6 ms it computes for 2."""
    rank = Rank(rank=0)
    for step in range(10):
        rank.loads(6 * MS)
        rank.computes(2 * MS)
        rank.ends(step)
    shares = read([rank], tmp_path).shares
    assert shares.step_s * 1e3 == pytest.approx(6, rel=0.06)
    assert ms(shares, "input") == pytest.approx(4, rel=0.06)
    assert ms(shares, "device") == pytest.approx(2, rel=0.01)


@WORDS
@pytest.mark.parametrize("ahead", [0, 7_200_000 * MS], ids=["one clock", "clocks 2 h apart"])
def test_a_slow_rank_is_waited_for(ahead: int, words: dict[str, str], tmp_path: Path) -> None:
    """Rank 1 computes for 3 ms more per step; an all-reduce takes 2 ms once all have begun it; clocks may differ."""
    ranks = [Rank(rank=number, words=words, ahead=ahead * number) for number in range(3)]
    for step in range(10):
        for rank in ranks:
            rank.computes((13 if rank.rank == 1 else 10) * MS)
        all_reduce(ranks, 2 * MS)
        for rank in ranks:
            rank.now = max(rank.now, rank.free[COMPUTE] - 8 * MS)
            rank.ends(step)
    shares = read(ranks, tmp_path).shares
    assert shares.num_ranks == 3
    assert shares.step_s * 1e3 == pytest.approx(15, rel=0.01)
    assert ms(shares, "device") == pytest.approx(10, rel=0.01)
    assert ms(shares, "gradients") == pytest.approx(2, rel=0.01)
    assert ms(shares, "device", waits=True) == pytest.approx(3, rel=0.01)
    assert {share.rank for share in shares.shares if share.rank is not None} == {1}
    assert shares.steady_rank == 1


def test_ranks_that_cannot_be_aligned_are_not_guessed_at(tmp_path: Path) -> None:
    """A rank's collectives do not end with the other's: only a note says it."""
    ranks = [Rank(rank=number) for number in range(2)]
    for step in range(10):
        for rank in ranks:
            rank.computes((10 + rank.rank) * MS)
        all_reduce(ranks, 2 * MS)
        for rank in ranks:
            rank.now = max(rank.now, rank.free[COMPUTE])
            rank.ends(step)
        ranks[1].ahead += 5 * MS
    shares = read(ranks, tmp_path).shares
    assert not [share for share in shares.shares if share.rank is not None]
    assert any("cannot be told" in note and "do not end together" in note for note in shares.notes)


def test_a_trace_of_a_cpu_divides_the_hosts_time(tmp_path: Path) -> None:
    """Operators count: 2 ms of a loader, 5 of operators, 3 of a collective, 1 of an update, 1 of other code."""
    rank = Rank(rank=0)
    for step in range(6):
        rank.event("cpu_op", "aten::stack", rank.now + MS, MS // 2, 1)
        rank.loads(2 * MS)
        for name, kind, took in (
            ("aten::addmm", "cpu_op", 5 * MS),
            ("gloo:all_reduce", "user_annotation", 3 * MS),
            ("Optimizer.step#SGD.step", "user_annotation", MS),
        ):
            rank.event(kind, name, rank.now, took, 1)
            if name.startswith("Optimizer"):
                rank.event("cpu_op", "aten::_foreach_add_", rank.now + 10, 5000, 1)
            rank.now += took
        rank.event("cpu_op", "c10d::allreduce_", rank.now - 3 * MS, 10, 1)
        rank.now += MS
        rank.ends(step)
    shares = read([rank], tmp_path).shares
    found = {share.kind: round(share.seconds * 1e3, 6) for share in shares.shares}
    assert found == {"input": 2, "device": 5, "gradients": 3, "optimizer": 1, "loop": 1}
    assert shares.step_s * 1e3 == pytest.approx(12)


def test_collectives_are_what_the_trace_calls_them(tmp_path: Path) -> None:
    """RCCL has one kernel for all; one among some ranks tells no waits, and the other ones still do."""
    ranks = [Rank(rank=number, words=ROCM) for number in range(2)]
    for step in range(6):
        for rank in ranks:
            for name, took in (("broadcast", 1), ("_allgather_base", 3)):
                size = 1 if took == 3 else 2
                rank.reduces(rank.ready() + took * MS, **{"Collective name": name, "Group size": size})
            rank.computes((5 + 2 * rank.rank) * MS)
            if rank.rank and step == 2:
                rank.reduces(rank.ready() + 10, **{"Collective name": "allreduce", "Group size": 1})
        end = max(rank.ready() for rank in ranks) + 2 * MS
        for rank in ranks:
            rank.reduces(end, **{"Collective name": "allreduce", "Group size": 2})
            rank.ends(step)
    shares = read(ranks, tmp_path).shares
    for kind, took in (("buffers", 1), ("collective", 3), ("gradients", 2), ("device", 5)):
        assert ms(shares, kind) == pytest.approx(took, rel=0.01)
    assert ms(shares, "device", waits=True) == pytest.approx(2, rel=0.01)


def test_cycles_of_ranks_are_joined(tmp_path: Path) -> None:
    """A file for each rank and profiling cycle; the time between cycles is of no step."""
    ranks = [Rank(rank=number) for number in range(2)]
    for cycle in range(3):
        for step in range(10 * cycle, 10 * cycle + 4):
            for rank in ranks:
                rank.computes((10 + 5 * rank.rank) * MS)
            all_reduce(ranks, MS)
            for rank in ranks:
                rank.now = max(rank.now, rank.free[COMPUTE])
                rank.ends(step)
        for rank in ranks:
            rank.write(tmp_path / f"rank{rank.rank}.{10**6 + cycle}.pt.trace.json")
            rank.events, rank.now, rank.begun = [], rank.now + 500 * MS, rank.now + 500 * MS
    shares = read_shares([tmp_path], "TRACE").shares
    assert shares.num_steps == 12
    assert shares.step_s * 1e3 == pytest.approx(16, rel=0.01)
    assert ms(shares, "device", waits=True) == pytest.approx(5, rel=0.01)


@pytest.mark.parametrize("is_early", [False, True], ids=["all end together", "the root ends early"])
def test_a_wait_in_a_broadcast_is_for_the_rank_that_is_late(is_early: bool, tmp_path: Path) -> None:
    """Rank 2 loads for 4 ms more before rank 0 broadcasts buffers: the others wait in that, and for rank 2.

    A root that does not wait for the others waits in the all-reduce instead.
    """
    ranks = [Rank(rank=number, words=WITH_BUFFERS, ahead=number * 1_000 * MS) for number in range(3)]
    for step in range(10):
        for rank in ranks:
            rank.now = max(rank.now, rank.free[COMPUTE])
            rank.loads((5 if rank.rank == 2 else 1) * MS)
        end = max(rank.ready() for rank in ranks) + MS // 10
        for rank in ranks:
            rank.reduces(rank.ready() + MS // 10 if is_early and rank.rank == 0 else end, "buffers")
            rank.computes(10 * MS)
        all_reduce(ranks, 2 * MS)
        for rank in ranks:
            rank.ends(step)
    shares = read(ranks, tmp_path).shares
    assert ms(shares, "input", waits=True) == pytest.approx(4, rel=0.01)
    assert ms(shares, "buffers") == pytest.approx(0.1, rel=0.01)
    assert ms(shares, "gradients") == pytest.approx(2, rel=0.01)
    assert {share.rank for share in shares.shares} == {None, 2}


def test_one_rank_of_several_tells_no_waits(tmp_path: Path) -> None:
    """Of a job of two ranks the trace of one is read: a note says that communication includes waits."""
    rank = Rank(rank=0)
    for step in range(6):
        rank.computes(5 * MS)
        rank.reduces(rank.ready() + 2 * MS)
        rank.ends(step)
    assert any("1 rank of 2" in note for note in read([rank], tmp_path).shares.notes)


TRAINING = """
import sys, time, torch
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.ones(256)

model = torch.nn.Linear(256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
cycle = schedule(wait=1, warmup=1, active=6, repeat=1)
def write(profiler):
    profiler.export_chrome_trace(sys.argv[1])
with profile(activities=[ProfilerActivity.CPU], schedule=cycle, on_trace_ready=write) as profiler:
    for batch in DataLoader(Slow(), batch_size=2):
        model(batch).sum().backward()
        optimizer.step()
        profiler.step()
"""


def test_torchs_own_trace_has_the_names_that_are_looked_for(tmp_path: Path) -> None:
    """A loader that takes 20 ms for a batch, operators, and an optimizer; the answer says what to do, and for what gain."""
    script, path = tmp_path / "training.py", tmp_path / "t.json.gz"
    script.write_text(TRAINING)
    done = run_python([script, path], tmp_path)
    assert done.code == 0, done.out
    shares = read_shares([path], "TRACE").shares
    assert shares.num_steps == 6
    assert 20 <= ms(shares, "input") <= shares.step_s * 1e3
    assert ms(shares, "optimizer") > 0
    assert ms(shares, "device") > 0
    assert sum(share.seconds for share in shares.shares) == pytest.approx(shares.step_s, rel=1e-12)
    assert re.search(r"\n     remedy: .*DataLoader\(.*\n     simulated with", text_of(explain_traces([path], "TRACE"), 120))


def test_another_link_changes_what_is_exposed(tmp_path: Path) -> None:
    """Twice as fast halves it, half as fast adds all communication once more; ranks count by the ring's volume."""
    rank = Rank(rank=0)
    for step in range(10):
        rank.computes(10 * MS)
        rank.reduces(rank.ready() + 2 * MS)
        rank.ends(step)
    found = dataclasses.replace(read([rank], tmp_path), num_ranks=2, hidden_s=1e-3)
    faster, slower = (projected(found, link_factor=factor, ranks=None) for factor in (2.0, 0.5))
    assert ms(faster, "gradients") == pytest.approx(1, rel=0.01)
    assert ms(slower, "gradients") == pytest.approx(5, rel=0.01)  # 2 ms, and 3 ms more of communication
    assert faster.step_s == pytest.approx(sum(share.seconds for share in faster.shares))
    assert ms(projected(found, link_factor=None, ranks=4), "gradients") == pytest.approx(3.5, rel=0.01)
    with pytest.raises(ConfigError, match="ranks"):
        projected(dataclasses.replace(found, num_ranks=1), link_factor=None, ranks=4)


def test_the_bound_of_another_link_holds_for_a_queue_of_buckets() -> None:
    """Buckets that become ready in a backward of 1 s and are sent one after the other, at any speed."""
    draw = random.Random(0)  # noqa: S311  # no secret
    for _ in range(200):
        ready = sorted(draw.random() for _ in range(draw.randrange(1, 8)))
        took = [draw.expovariate(5) for _ in ready]

        def exposed_s(factor: float, ready: list[float] = ready, took: list[float] = took) -> float:
            end = 0.0
            for begin, each in zip(ready, took, strict=True):
                end = max(begin, end) + each * factor
            return max(end - 1.0, 0.0)

        gradients = Share(kind="gradients", seconds=exposed_s(1.0))
        shares = (Share(kind="device", seconds=1.0), gradients)
        found = TraceShares(
            shares=Shares(step_s=1.0 + gradients.seconds, num_steps=1, num_ranks=2, shares=shares),
            hidden_s=sum(took) - gradients.seconds,
            num_ranks=2,
            host_waits=(),
        )
        for factor in (0.1, 0.5, 0.9, 1.0, 1.1, 2.0, 10.0):
            step_s = projected(found, link_factor=1.0 / factor, ranks=None).step_s
            assert 1.0 + exposed_s(factor) <= step_s + 1e-9
