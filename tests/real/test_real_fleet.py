"""fleet: a user's script becomes distributed by four lines, under our launcher, torchrun, or alone."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import training_problem as problem
from processes import forked_launches, run_scripts

from fleetbench.cluster import Cluster
from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.experiment import Experiment
from fleetbench.strategy import DistributedStrategy
from fleetbench.workload import Workload
from real.communication.communicators import backend_of_world
from real.fleet import Fleet
from real.job.launcher import launch_script
from real.job.script_session import ScriptSession

MOMENTUM = problem.optimizer_of("momentum")
SCRIPT = Path(__file__).with_name("four_lines.py")


def _launch(tmp_path: Path, nproc: int, *arguments: str) -> bytes:
    echoed: list[bytes] = []
    assert launch_script(nproc, [str(SCRIPT), str(tmp_path / "out"), *arguments], log_dir=tmp_path / "log", echo=echoed.append)
    return b"".join(echoed)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _parameters(tmp_path: Path, rank: int) -> np.ndarray:
    return np.load(tmp_path / f"out.{rank}.npz")["parameters"]


@pytest.mark.parametrize("ranks_are", ["forks", pytest.param("processes", marks=pytest.mark.slow)])
def test_two_trainers_train_as_one(tmp_path: Path, ranks_are: str) -> None:
    """Launched on two ranks, the four lines give one process's result on the joint batch, and logs a rank."""
    with forked_launches() if ranks_are == "forks" else nullcontext():
        text = _launch(tmp_path, 2)
    expected = problem.joint_training(2, "float64", MOMENTUM)[-1].numpy()
    for rank in range(2):
        np.testing.assert_allclose(_parameters(tmp_path, rank), expected, rtol=0, atol=1e-12)
        assert f"rank {rank} of 2 is done" in (tmp_path / "log" / f"workerlog.{rank}").read_text()
    assert b"rank 0 of 2 is done" in text
    assert b"DistributedStrategy Overview" in text


def test_the_documents_advice_is_a_strategy() -> None:
    """A tenth of the gradients' 100 MB in a bucket; two communicators on two nodes, none waiting for the other."""
    advised = Fleet.advice(Workload(), Cluster(nodes=2, trainers_per_node=4), 100 * 2**20).strategy
    assert (advised.fuse_grad_size_in_MB, advised.nccl_comm_num, advised.sync_nccl_allreduce) == (10.0, 2, False)


def test_the_script_loads_its_strategy(tmp_path: Path) -> None:
    """Local SGD from a strategy file equals the written-out loop; ``fleet.synchronize`` closes the last round."""
    DistributedStrategy(localsgd=True, localsgd_configs={"k_steps": 7}).save(tmp_path / "recommended.toml")  # type: ignore[arg-type]  # tables are decoded
    torchruns = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    ranks = [{**torchruns, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    run_scripts([SCRIPT, tmp_path / "out", tmp_path / "recommended.toml"], tmp_path, *ranks)
    expected = problem.local_training(2, "float64", MOMENTUM, problem.Schedule({1, 8, problem.STEPS}))[0, -1].numpy()
    for rank in range(2):
        np.testing.assert_allclose(_parameters(tmp_path, rank), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("made", "expected"),
    [("cpu:gloo", "gloo"), ("cpu:gloo,cuda:gloo", "gloo"), ("cuda:nccl", "nccl"), ("cpu:gloo,cuda:nccl", "nccl")],
    ids=["no backend, no CUDA", "gloo", "nccl", "no backend, CUDA"],
)
def test_a_group_of_the_script_s_own_says_what_carries_cuda(made: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group made without naming a backend counts as NCCL where torch gave it NCCL for CUDA."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: made)
    assert backend_of_world() == expected


@pytest.mark.slow
def test_torchrun_launches_the_same_script(tmp_path: Path) -> None:
    """Under plain torchrun the role comes from torchrun's variables."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT), str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    expected = problem.joint_training(2, "float64", MOMENTUM)[-1].numpy()
    np.testing.assert_allclose(_parameters(tmp_path, 1), expected, rtol=0, atol=1e-12)


def test_alone_the_script_is_one_trainer(tmp_path: Path) -> None:
    """Without a launcher the same script trains by itself."""
    run_scripts([SCRIPT, tmp_path / "out"], tmp_path, {})
    np.testing.assert_allclose(_parameters(tmp_path, 0), problem.joint_training(1, "float64", MOMENTUM)[-1].numpy(), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "leave", "rank", "says"),
    [
        pytest.param("pass", "break", 1, "rank 1 has ended while others still train", marks=pytest.mark.whole),
        ("pass", "sys.exit(3)", 0, "because rank 1 has ended while others still train"),
        ("pass", "torch.distributed.destroy_process_group(); sys.exit()", 1, "rank 1 has ended while others still train"),
        pytest.param(
            "torch.distributed.init_process_group('gloo')",
            "break",
            1,
            "rank 1 has ended while others still train",
            marks=pytest.mark.whole,
        ),
    ],
    ids=["break", "sys.exit", "destroyed group", "group of its own"],
)
def test_a_rank_that_leaves_early_is_named(tmp_path: Path, begin: str, leave: str, rank: int, says: str) -> None:
    """A rank that leaves early does not end with exit code 0, whoever made or destroyed the process group."""
    script = tmp_path / "leaves.py"
    script.write_text(
        f"import sys, torch\nfrom fleetbench import fleet\n{begin}\nfleet.init(timeout_s=10)\n"
        "model = fleet.distributed_model(torch.nn.Linear(4, 1))\n"
        "optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        f"for step in range(9):\n    if step == 3 and fleet.worker_index() == 1: {leave}\n"
        "    model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    with pytest.raises(WorkerFailed, match="rank 1"):
        launch_script(2, [str(script)], log_dir=tmp_path / "log")
    assert says in (tmp_path / "log" / f"workerlog.{rank}").read_text()


def test_a_failing_rank_is_named(tmp_path: Path) -> None:
    """A rank that raises ends the launch; the error names it and its log, which holds the traceback."""
    script = tmp_path / "fails.py"
    script.write_text("import os\nif os.environ['RANK'] == '1': raise SystemExit(7)\nimport time\ntime.sleep(60)\n")
    with pytest.raises(WorkerFailed, match="rank 1: ended with exit code 7"):
        launch_script(2, [str(script)], log_dir=tmp_path / "log")


@pytest.mark.slow
def test_a_script_that_never_joins_is_told_from_one_that_does(tmp_path: Path) -> None:
    """It ends well, and the launch knows that nobody called ``fleet.init``."""
    script = tmp_path / "plain.py"
    script.write_text("print('trained alone')\n")
    assert launch_script(2, [str(script)], log_dir=tmp_path / "log") is False


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["script", "registry"])
def test_a_script_with_servers_is_not_tuned(mode: str, tmp_path: Path) -> None:
    """It is refused as soon as it says so, with exit code 2, and not after its whole training; also where it catches its own errors."""
    script, experiment = tmp_path / "served.py", tmp_path / "served.toml"
    script.write_text("from fleetbench import DistributedStrategy, fleet\nfleet.init(DistributedStrategy(mode='ps', a_sync=True))\n")
    experiment.write_text(
        'name = "served"\n[workload]\nmodel = "digits_mlp"\n[cluster]\nservers = 1\n[strategy]\nmode = "ps"\na_sync = true\n'
    )
    command = [str(script)] if mode == "script" else ["-m", "real.workloads.train", str(experiment)]
    with pytest.raises(ConfigError, match="parameter servers") as caught, ScriptSession([sys.executable, *command], Experiment()):
        pass
    assert caught.value.where == "strategy.mode"


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_ended(tmp_path: Path) -> None:
    """SIGSTOP: the others end by their timeout, and the one that did not answer is not taken for killed by a stranger."""
    script = tmp_path / "stops.py"
    script.write_text(
        "import os, signal, torch\nfrom fleetbench import fleet\nfleet.init(timeout_s=3)\n"
        "model = fleet.distributed_model(torch.nn.Linear(4, 1))\n"
        "optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "for step in range(9):\n    if step == 3 and fleet.worker_index() == 1: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "    model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    with pytest.raises(WorkerFailed, match="rank 1: was stopped"):
        launch_script(2, [str(script)], log_dir=tmp_path / "log")


BEFORE: dict[str, list[object]] = {
    "distributed_model": [torch.nn.Linear(1, 1)],
    "distributed_optimizer": [None],
    "save_persistables": ["folder"],
    "load_persistables": ["folder"],
    "save_inference_model": ["model.pt2", [torch.ones(2, 1)]],
    **{
        name: []
        for name in (
            "worker_num",
            "worker_endpoints",
            "is_server",
            "server_num",
            "server_index",
            "synchronize",
            "no_sync",
            "barrier_worker",
        )
    },
}


@pytest.mark.parametrize("call", BEFORE)
def test_calls_before_init_are_refused(call: str) -> None:
    """Out of order, every call says what comes first."""
    argument = BEFORE[call]
    with pytest.raises(ConfigError, match=r"fleet\.") as caught:
        getattr(Fleet(), call)(*argument)
    assert caught.value.hint is not None


@pytest.mark.parametrize("fields", [{"mode": "ps"}, {"auto": True, "nccl_comm_num": 2}])
def test_a_strategy_that_is_not_executed_is_refused_before_joining(fields: dict[str, object]) -> None:
    """``fleet.init`` names the field, and no process group is made."""
    with pytest.raises(ConfigError, match=f"strategy.{next(iter(fields))}"):
        Fleet().init(DistributedStrategy(**fields))  # type: ignore[arg-type]  # one field of any type
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_a_script_that_was_killed_in_a_save_goes_on_from_the_save_before(tmp_path: Path) -> None:
    """Rank 0 is killed in its second save: started again, the script goes on within the round of the first, to the uninterrupted result."""
    script, path = Path(__file__).with_name("saving_script.py"), tmp_path / "checkpoint"
    with pytest.raises(WorkerFailed, match="rank 0"):
        launch_script(2, [str(script), str(tmp_path / "out"), str(path), "6"], log_dir=tmp_path / "log")
    launch_script(2, [str(script), str(tmp_path / "out"), str(path)], log_dir=tmp_path / "log")
    updates = {*range(1, problem.STEPS + 1, 4), problem.STEPS}
    expected = problem.local_training(2, "float64", MOMENTUM, problem.Schedule(updates))[0, -1].numpy()
    for rank in range(2):
        np.testing.assert_allclose(_parameters(tmp_path, rank), expected, rtol=0, atol=1e-12)
        assert np.load(tmp_path / f"out.{rank}.npz")["done"] == 3
    assert sorted(item.name for item in path.iterdir()) == ["save-00000003"]
