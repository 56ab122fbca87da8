"""What only a CUDA device shows. ``reports/gpu/measure.py`` runs these and more."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mirror import Mirror
from torch import nn

from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from real.communication.clocks import CudaClock
from real.compute.compute import apply_device_settings
from real.compute.injector import delay_of
from real.engine.engine import Engine
from real.engine.optimizers import scale_rates
from sim.learning.virtual_training import VirtualTraining

pytestmark = pytest.mark.gpu
MS = 1_000_000


@pytest.fixture(autouse=True)
def no_ras(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's service for reliability listens on a port as long as the process lives."""
    monkeypatch.setenv("NCCL_RAS_ENABLE", "0")


def device() -> torch.device:
    """The first."""
    return torch.device("cuda", 0)


def test_a_mark_lies_between_the_hosts_looks_at_its_clock() -> None:
    """To 0.1 ms, before an anchor is due and after several."""
    clock = CudaClock(device())
    for pause_s in (0.0, 1.1, 1.1, 0.5):
        time.sleep(pause_s)
        before = time.monotonic_ns()
        mark = clock.mark()
        mark.synchronize()
        after = time.monotonic_ns()
        (told,) = clock.resolve([mark])
        assert before - MS // 10 < told < after + MS // 10


def test_injected_delays_are_as_long_as_asked_for_once_some_have_passed() -> None:
    """The median of 40 delays of 2 ms after matrix products is within 3 %; 40 before them showed the rate of cycles in this mix of work."""
    delay, clock = delay_of(device()), CudaClock(device())
    matrix = torch.rand(4096, 4096, device=device())
    for _ in range(2):
        marks = []
        for _ in range(40):
            torch.mm(matrix, matrix)
            begin = clock.mark()
            delay.add(2 * MS)
            marks += [begin, clock.mark()]
        times = clock.resolve(marks)
    lengths = sorted(end - begin for begin, end in zip(times[::2], times[1::2], strict=True))
    assert lengths[20] == pytest.approx(2 * MS, rel=0.03)


def test_a_bounded_share_of_the_memory_leaves_room_for_small_tensors() -> None:
    """With one large tensor in use, and most of the share taken ahead, ten thousand tensors of 10 kB find a place."""
    undo = apply_device_settings(DistributedStrategy(fraction_of_gpu_memory_to_use=0.05), device())
    try:
        large = torch.ones(2**22, device=device())
        small = [torch.ones(2500, device=device()) for _ in range(10_000)]
        assert float(large.sum() + sum(tensor.sum() for tensor in small)) == 2**22 + 2500 * 10_000
        assert torch.cuda.memory_reserved(device()) <= 0.05 * torch.cuda.get_device_properties(device()).total_memory
    finally:
        undo()


def test_a_trainer_and_its_image_on_nccl_train_as_one_without_fleetbench(tmp_path: Path) -> None:
    """Groups are opened and tried, buckets travel on two communicators at once, and the parameters are those of a plain loop."""

    def train(*, distributed: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double().to(device())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.linspace(-1, 1, 32, dtype=torch.float64, device=device()).view(4, 8)
        engine = None
        if distributed:
            fields = {"fuse_grad_size_in_MB": 0.0005, "nccl_comm_num": 2, "sync_nccl_allreduce": False}
            engine = Engine(model, DistributedStrategy.from_dict(fields), Mirror("nccl", timedelta(seconds=60), device()))
            engine.attach_optimizer(optimizer)
        for _ in range(5):
            model(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if engine is not None:
            engine.close()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()

    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        torch.testing.assert_close(train(distributed=True), train(distributed=False), rtol=0, atol=1e-12)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("fragments", [1, 2])
def test_an_outer_optimizer_on_the_host_steps_as_one_on_the_device(tmp_path: Path, fragments: int) -> None:
    """Theta and the outer momentum come from pinned memory and go back: the parameters are the same, bit by bit."""

    def train(*, on_host: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).to(device())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        configs = {"k_steps": 4, "fragments": fragments, "outer_lr": 0.7, "outer_momentum": 0.9, "outer_on_host": on_host}
        strategy = DistributedStrategy.from_dict({"localsgd": True, "localsgd_configs": configs})
        engine = Engine(model, strategy, Mirror("nccl", timedelta(seconds=60), device()))
        engine.attach_optimizer(optimizer)
        for _ in range(12):
            model(torch.linspace(-1, 1, 32, device=device()).view(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(delta.snapshot[0].is_pinned() == on_host for delta in engine.executor.storage.deltas)
        engine.close()
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()

    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        assert torch.equal(train(on_host=True), train(on_host=False))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}], ids=["plain", "capturable", "fused"])
def test_a_scaled_learning_rate_on_the_device_is_that_of_an_optimizer_that_has_it(options: dict[str, bool]) -> None:
    """Adam, its rate a number, or, where torch takes that, a tensor on the device; which is the script's own again after each step."""

    def train(lr: float | torch.Tensor, lr_scale: float) -> torch.Tensor:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(100, 30, device=device()))
        own = lr.to(device()) if isinstance(lr, torch.Tensor) else lr
        optimizer = torch.optim.Adam([parameter], lr=own, **options)
        for _ in range(5):
            parameter.grad = parameter.detach().sin()
            restore = scale_rates(optimizer, lr_scale)
            optimizer.step()
            restore()
            assert optimizer.param_groups[0]["lr"] is own
        return parameter.detach().cpu()

    for rate in (0.01, *([torch.tensor(0.01)] if options else [])):
        torch.testing.assert_close(train(rate, 0.5), train(rate / 2, 1.0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", ["loop", "graph"])
@pytest.mark.parametrize(
    "strategy",
    [{}, {"localsgd": True, "localsgd_configs": {"k_steps": 4, "outer_lr": 0.7}}, {"lr_scale": 2.0}],
    ids=["all", "local", "rate"],
)
def test_virtual_trainers_learn_on_the_device_what_they_learn_on_the_cpu(tmp_path: Path, way: str, strategy: dict[str, object]) -> None:
    """In float64, up to the order of sums: parameters, and the held-out loss."""
    workload = {"model": "digits_cnn", "dtype": "float64", "batch_size": 4, "steps": 12, "eval_every": 6, "optimizer": "adam", "lr": 0.01}
    experiment = Experiment.from_dict({"workload": workload, "cluster": {"trainers_per_node": 3}, "strategy": strategy})

    def learnt(way: str, device: str) -> torch.Tensor:
        training = VirtualTraining(experiment, tmp_path / f"{way} {device}", way, device=device)
        found = training.run()
        assert training.replicas.evaluated().device.type == device
        return torch.cat([training.replicas.evaluated().cpu(), torch.tensor([loss for _, loss in found.held_out])])

    torch.testing.assert_close(learnt(way, "cuda"), learnt("loop", "cpu"), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("trainers", [1, 2])
def test_a_script_whose_model_is_on_the_device_trains_there(tmp_path: Path, trainers: int) -> None:
    """Alone, as without fleetbench; more trainers than devices meet on gloo."""
    examples, options = Path(__file__).parents[2] / "examples", ["--epochs", "1", "--updates", "20"]
    DistributedStrategy().save(tmp_path / "plain.toml")
    launch = [] if trainers == 1 else ["-m", "fleetbench", "launch", "--nproc", str(trainers)]
    command = [sys.executable, *launch, str(examples / "gpt.py"), *options, "--strategy", str(tmp_path / "plain.toml")]

    def said(command: list[str]) -> float:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return float(done.stdout.split("held-out loss: ")[1])

    plain = said([sys.executable, str(examples / "gpt_plain.py"), *options])
    assert said(command) == pytest.approx(plain, rel=1e-3 if trainers == 1 else 0.2)
