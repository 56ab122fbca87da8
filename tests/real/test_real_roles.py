"""Roles: which trainer a process is, by the variables of torchrun, Paddle and Slurm."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest
import training_problem as problem
from processes import run_scripts

from fleetbench.errors import ConfigError
from real.processes.roles import STORE, Role, require_address, role_of

SCRIPT = Path(__file__).with_name("four_lines.py")
MOMENTUM = problem.optimizer_of("momentum")

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
ENDPOINTS = "10.0.0.1:6170,10.0.0.1:6171,10.0.0.2:6170,10.0.0.2:6171"
PADDLE = {"PADDLE_TRAINER_ID": "3", "PADDLE_TRAINERS_NUM": "4", "PADDLE_TRAINER_ENDPOINTS": ENDPOINTS, "TRAINING_ROLE": "TRAINER"}
SLURM = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_torchruns_variables() -> None:
    """Rank 5 of 8 is the second of node 1's four, and rank 0's address is left to torch."""
    role = role_of(TORCHRUN)
    assert role == Role(launcher="torchrun", rank=5, trainers=8, local_rank=1, trainers_per_node=4, rendezvous="env://")
    require_address(role, TORCHRUN)


def test_a_launch_on_one_machine_meets_in_a_file() -> None:
    """The file of ``fleetbench launch`` stands for address and port, which are then not needed."""
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", STORE: "/tmp/x/store"}  # noqa: S108  # a name alone
    role = role_of(launched)
    assert (role.store, role.rendezvous) == (launched[STORE], None)
    require_address(role, launched)


def test_paddles_variables() -> None:
    """Trainer 3 is the second on the second host; the first endpoint is where trainers meet."""
    role = role_of(PADDLE)
    assert role.endpoints == tuple(ENDPOINTS.split(","))
    assert (role.launcher, role.rank, role.trainers, role.local_rank, role.trainers_per_node) == ("Paddle", 3, 4, 1, 2)
    assert role.rendezvous == "tcp://10.0.0.1:6170"


def test_paddles_servers_are_told_apart() -> None:
    """A server finds itself in the list by its own address and port."""
    servers = "10.0.0.8:7000,10.0.0.9:7000"
    shared = {"PADDLE_PSERVERS_IP_PORT_LIST": servers, "PADDLE_TRAINERS_NUM": "4"}
    role = role_of({**shared, "TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.9", "PADDLE_PORT": "7000"})
    assert (role.kind, role.rank, role.trainers, role.servers) == ("server", 1, 4, tuple(servers.split(",")))
    assert role_of({**PADDLE, **shared}).kind == "trainer"
    with pytest.raises(ConfigError, match="PADDLE_PSERVERS_IP_PORT_LIST"):
        role_of({**shared, "TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.7", "PADDLE_PORT": "7000"})


def test_slurms_variables() -> None:
    """Task 9 of a step of two nodes with eight each; the first node of the list is where they meet."""
    role = role_of(SLURM)
    assert (role.launcher, role.rank, role.trainers, role.local_rank, role.trainers_per_node) == ("Slurm", 9, 16, 1, 8)
    assert role.rendezvous is not None
    assert role.rendezvous.startswith("tcp://gpu07:")


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[07-08]", "gpu07"),
        ("gpu[3,5-6]", "gpu3"),
        ("login,gpu[1-2]", "login"),
        ("r[1-2]n[08-16],x", "r1n08"),
        ("a-b.c", "a-b.c"),
        ("n[1-2]-ib,m", "n1-ib"),
    ],
)
def test_the_first_of_slurms_nodes(nodelist: str, first: str) -> None:
    """Ranges, lists, several brackets in a name, and names without any."""
    role = role_of({**SLURM, "SLURM_STEP_NODELIST": nodelist})
    assert role.rendezvous is not None
    assert role.rendezvous.removeprefix("tcp://").rpartition(":")[0] == first


def test_slurms_port_is_the_steps_own() -> None:
    """Two steps of a job and two jobs on a node do not take one port; what the step reserved or the user says goes before."""

    def port(**changes: str) -> int:
        rendezvous = role_of({**SLURM, **changes}).rendezvous
        assert rendezvous is not None
        return int(rendezvous.rpartition(":")[2])

    assert len({port(), port(SLURM_STEP_ID="3"), port(SLURM_JOB_ID="1001"), port(SLURM_JOB_ID="1002")}) == 4
    assert all(1024 < port(SLURM_JOB_ID=str(job)) < 32768 for job in range(0, 10**7, 99_991))
    assert port(SLURM_STEP_RESV_PORTS="12345-12346") == 12345
    assert port(SLURM_STEP_RESV_PORTS="12345-12346", MASTER_PORT="4000") == 4000
    assert role_of({**SLURM, "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4000"}).rendezvous == "tcp://10.1.2.3:4000"


def test_one_node_of_slurm_meets_on_the_loopback() -> None:
    """Nobody else is to be reached, and no name has to be known."""
    role = role_of({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "16", "SLURM_NODEID": "0"})
    assert role.rendezvous is not None
    assert role.rendezvous.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    "environment",
    [
        {**TORCHRUN, "WORLD_SIZE": "7"},
        {**TORCHRUN, "GROUP_RANK": "2"},
        {**PADDLE, "PADDLE_TRAINER_ENDPOINTS": "a:1,a:2,a:3,b:1"},
        {**PADDLE, "PADDLE_TRAINER_ENDPOINTS": "a:1,b:1,a:2,b:2"},
        {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "9,7"},
        {**SLURM, "SLURM_NODEID": "0"},
    ],
    ids=["torchrun uneven", "torchrun elsewhere", "Paddle uneven", "Paddle in turn", "Slurm uneven", "Slurm cyclic"],
)
def test_what_is_no_hierarchy_is_seen(environment: dict[str, str]) -> None:
    """Where nodes differ, or ranks go round the nodes in turn, there is no number of trainers a node."""
    assert role_of(environment).trainers_per_node is None


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({**TORCHRUN, "RANK": "8"}, "RANK"),
        ({**TORCHRUN, "LOCAL_RANK": "one"}, "LOCAL_RANK"),
        ({**PADDLE, "PADDLE_TRAINER_ENDPOINTS": "a:1"}, "PADDLE_TRAINER_ENDPOINTS"),
        ({**PADDLE, "TRAINING_ROLE": "HETER_TRAINER"}, "TRAINING_ROLE"),
        ({name: value for name, value in PADDLE.items() if name != "PADDLE_TRAINERS_NUM"}, "PADDLE_TRAINERS_NUM"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "many"}, "SLURM_STEP_TASKS_PER_NODE"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST"),
    ],
)
def test_what_is_missing_or_senseless_is_named(environment: dict[str, str], named: str) -> None:
    """The variable stands in the error, with what to do."""
    with pytest.raises(ConfigError) as caught:
        role_of(environment)
    assert caught.value.where == named
    assert caught.value.hint


def test_paddles_variables_train(tmp_path: Path) -> None:
    """Two trainers that know Paddle's variables alone give one process's result on the joint batch."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        first = probe.getsockname()[1]
    endpoints = f"127.0.0.1:{first},127.0.0.1:{first + 1}"
    shared = {"PADDLE_TRAINERS_NUM": "2", "PADDLE_TRAINER_ENDPOINTS": endpoints}
    ranks = [{**shared, "PADDLE_TRAINER_ID": str(rank)} for rank in range(2)]
    texts = run_scripts([SCRIPT, tmp_path / "out"], tmp_path, *ranks)
    expected = problem.joint_training(2, "float64", MOMENTUM)[-1].numpy()
    for rank in range(2):
        np.testing.assert_allclose(np.load(tmp_path / f"out.{rank}.npz")["parameters"], expected, rtol=0, atol=1e-12)
    assert "Paddle" in texts[0]
    assert "Paddle" not in texts[1]
