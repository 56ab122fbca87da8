"""``fleet`` in a job with parameter servers: who may call what, and what a script that forgets something is told."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from server_job import add_gradients, free_port, job, together

from fleetbench import DistributedStrategy
from fleetbench.cli.main import main
from fleetbench.errors import ConfigError, WorkerFailed
from real.fleet import Fleet
from real.processes.roles import Role
from real.servers.served import Served

SERVED = DistributedStrategy(mode="ps", a_sync=True, a_sync_configs={"k_steps": 0})  # type: ignore[arg-type]  # its table
SYNCHRONOUS = DistributedStrategy(mode="ps")


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """Another process's ``fleet``, which leaves at the test's end."""
    monkeypatch.setattr(atexit, "register", lambda function: function)
    fresh = Fleet()
    yield fresh
    if isinstance(fresh._job, Served):
        if fresh._job.training is not None:
            fresh._job.training.close()
        if fresh._job._server is not None:
            fresh._job._server.close()


def be(monkeypatch: pytest.MonkeyPatch, kind: str, endpoints: str, trainers: int = 1) -> None:
    """Set the variables of a launcher."""
    variables = {"PADDLE_PSERVERS_IP_PORT_LIST": endpoints, "PADDLE_TRAINERS_NUM": str(trainers)}
    if kind == "trainer":
        variables |= {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0"}
    else:
        host, _, port = endpoints.partition(":")
        variables |= {"TRAINING_ROLE": "PSERVER", "POD_IP": host, "PADDLE_PORT": port}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_server_knows_what_it_is(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a server with a number, has no use for the model, and refuses what trainers do."""
    be(monkeypatch, "server", f"127.0.0.1:{free_port()}", trainers=3)
    fleet.init(SERVED, timeout_s=77.0)
    assert (fleet.is_server(), fleet.is_worker(), fleet.is_first_worker()) == (True, False, False)
    assert (fleet.server_index(), fleet.server_num(), fleet.worker_num()) == (0, 1, 3)
    model = torch.nn.Linear(2, 2)
    assert fleet.distributed_model(model) is model
    for call in (fleet.init_worker, fleet.stop_worker, fleet.worker_index, lambda: fleet.save_persistables("x")):
        with pytest.raises(ConfigError, match="this process is no trainer"):
            call()
    assert isinstance(fleet._job, Served)
    assert fleet.init_server() is False


def test_a_trainer_trains_by_the_documented_lines(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Init, model, optimizer, init_worker, loop, stop_worker; what the servers hold is what the loop made, and the log is printed."""
    with job(2) as running:
        be(monkeypatch, "trainer", ",".join(running.endpoints))
        fleet.init(SERVED, log_every=2)
        model = fleet.distributed_model(torch.nn.Linear(3, 1, bias=False))
        torch.nn.init.zeros_(model.weight)  # type: ignore[arg-type]  # its weight
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        with pytest.raises(ConfigError, match=r"fleet.init_worker.*\n.*before the first step"):
            model(torch.ones(1, 3))
        fleet.init_worker()
        assert (fleet.worker_index(), fleet.is_first_worker(), fleet.is_server(), fleet.server_num()) == (0, True, False, 2)
        for _ in range(4):
            loss = model(torch.ones(1, 3)).sum()
            optimizer.zero_grad()
            loss.backward()
            fleet.report(loss=loss)
            optimizer.step()
        fleet.end_epoch()
        fleet.barrier_worker()
        fleet.synchronize()
        assert torch.equal(running.dense(), torch.full((3,), -4.0))
        fleet.stop_worker()
        running.reports()
    told = capsys.readouterr()
    assert "servers" in told.err
    assert "batch" in told.out + told.err


def test_calls_that_need_servers_before_or_behind_them_say_so(fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is a configuration error that names the call to make first, and again once the trainer has left."""
    with job() as running:
        be(monkeypatch, "trainer", running.endpoints[0])
        fleet.init(SERVED)
        model = fleet.distributed_model(torch.nn.Linear(2, 2))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        calls = (
            fleet.synchronize,
            fleet.pull_model,
            lambda: fleet.save_persistables(tmp_path),
            lambda: fleet.save_inference_model(tmp_path / "x.pt2", (torch.ones(2, 2),)),
            fleet.barrier_worker,
            fleet.stop_worker,
        )
        for call in calls:
            with pytest.raises(ConfigError, match=r"fleet\.init_worker: this trainer has not joined its servers"):
                call()
        fleet.init_worker()
        add_gradients(model, 1.0)
        optimizer.step()
        fleet.stop_worker()
        for call in calls:
            with pytest.raises(ConfigError, match=r"fleet\.stop_worker: this trainer has left its servers"):
                call()
        model(torch.ones(1, 2))  # which is its own now
        assert running.dense().numel() == 6


def test_what_a_trainer_of_servers_does_not_have_is_refused(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collective calls, a server's calls, calls out of order: each says what to do instead."""
    be(monkeypatch, "trainer", f"127.0.0.1:{free_port()}")
    fleet.init(SERVED)
    with pytest.raises(ConfigError, match="this process is no server"):
        fleet.init_server()
    with pytest.raises(ConfigError, match="this process is no server"):
        fleet.server_index()
    with pytest.raises(ConfigError, match="there is no model yet"):
        fleet.init_worker()
    fleet.distributed_model(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="distributed_optimizer first"):
        fleet.init_worker()
    with pytest.raises(ConfigError, match=r"(?s)do not have this.*gradients go out at optimizer\.step"):
        fleet.no_sync()
    with pytest.raises(ConfigError, match=r"(?s)do not have this.*fleet\.init_server\(FOLDER\)"):
        fleet.load_persistables("x")
    with pytest.raises(ConfigError, match="call it once"):
        fleet.init(SERVED)


def test_a_job_without_servers_is_refused(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that was started alone is told how to start."""
    with pytest.raises(ConfigError, match="fleetbench launch --servers"):
        fleet.init(SERVED)
    be(monkeypatch, "trainer", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="is not in a job with parameter servers"):
        fleet.init_worker()


def test_a_checkpoint_that_cannot_be_written_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Two trainers ask for it: rank 0 raises why, rank 1 gets past it, and both train on and leave."""
    no_folder = tmp_path / "file"
    no_folder.write_text("in the way")
    with job(1, 2) as running:
        is_past = threading.Event()
        roles = [Role(launcher="Paddle", rank=rank, trainers=2, servers=running.endpoints) for rank in (0, 1)]
        both = [Served(role, SERVED, 80.0) for role in roles]

        def work(served: Served) -> None:
            model = torch.nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            served.training = running.trainer(served.role.rank, model, optimizer, SERVED)
            if served.role.rank == 0:
                with pytest.raises(WorkerFailed, match=r"(?s)file: the checkpoint could not be written: server.*File exists"):
                    served.save(no_folder, extra=None)
                assert is_past.wait(10)  # whose leave would let rank 1 go, too
            else:
                served.save(no_folder, extra=None)
                is_past.set()
            add_gradients(model, 1.0)
            optimizer.step()
            served.trained("fleet.stop_worker").finish()

        together(*[lambda served=served: work(served) for served in both])
        assert [load.staleness.total() for load in running.reports()] == [2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--servers", "1", "x.py"], "--servers, --workers"),
        (["--workers", "1", "x.py"], "--servers, --workers"),
        (["--servers", "1", "--workers", "1", "--nproc", "2", "x.py"], "--nproc"),
        (["--servers", "1", "--workers", "1", "nowhere.py"], "no such script"),
    ],
)
def test_a_launch_that_makes_no_sense_is_refused(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, with the option that is wrong or missing."""
    assert main(["launch", *arguments]) == 2
    assert named in capsys.readouterr().err
