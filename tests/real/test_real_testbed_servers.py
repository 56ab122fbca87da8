"""Parameter servers on the testbed: hosts behind shaped links, and nothing left over. Skipped where there are no namespaces."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_real_testbed import _networks

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from fleetbench.experiment import Experiment
from fleetbench.workloads.models.registry import build_model
from real.job.session import Session, measure
from real.leg import Leg
from real.profile.measuring import _quiet
from real.supported import refuse_unsupported
from real.testbed import noise
from real.testbed.network import Network

RATE = 40_000_000
PAYLOAD_BPS = RATE * 1448 / 1514
"""By hand: 1448 bytes of payload in a frame of 1514."""
WORKLOAD = {"model": "digits_mlp", "batch_size": 16, "lr": 0.1, "steps": 12}
STEPS = 12


@pytest.fixture
def namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip where this machine has no namespaces for us; measure once, however busy it is."""
    try:
        Network(["probe"]).close()
    except EnvironmentLacks as error:
        pytest.skip(f"SKIPPED: {error.what}")
    monkeypatch.setattr(noise, "FOREIGN_LIMIT", 1e9)
    monkeypatch.setattr(noise, "SENTINEL_LIMIT", 1e9)


def box(strategy: dict[str, Any], placement: str = "own", launcher: str = "testbed", steps: int = STEPS) -> Experiment:
    """Two nodes of one trainer, two servers."""
    cluster = {"nodes": 2, "servers": 2, "server_placement": placement, "inter": {"bandwidth": "40 Mbit/s"}}
    return Experiment.from_dict(
        {
            "workload": {**WORKLOAD, "steps": steps},
            "cluster": cluster,
            "strategy": {"mode": "ps", **strategy},
            "run": {"launcher": launcher, "warmup_steps": 2, "timeout": "30 s"},
        }
    )


def found(module: str, children: list[psutil.Process]) -> list[psutil.Process]:
    """Processes that run a module."""
    processes = []
    for process in children:
        try:
            if module in process.cmdline():
                processes.append(process)
        except psutil.NoSuchProcess:
            continue
    return processes


def networks_of(children: list[psutil.Process]) -> dict[str, str]:
    """Network namespaces by ``server N`` and ``rank N``."""
    servers = {f"server {process.cmdline()[-1]}": process for process in found("real.servers.leg_servers", children)}
    ranks = {f"rank {process.environ()['RANK']}": process for process in found("real.workloads.train", children)}
    return {name: os.readlink(f"/proc/{process.pid}/ns/net") for name, process in (servers | ranks).items()}  # noqa: PTH115  # a magic link, not a path


def test_a_profile_is_taken_without_servers() -> None:
    """It times layers and the trainers' own network: what is launched for it on the testbed is no job of servers, and can be run."""
    quiet = _quiet(box({"a_sync": True}, "shared"))
    refuse_unsupported(quiet, quiet.strategy)
    assert (quiet.cluster.servers, quiet.cluster.nodes) == (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "strategy"),
    [
        pytest.param("own", {}, marks=pytest.mark.whole),
        pytest.param("own", {"a_sync": True, "a_sync_configs": {"k_steps": 3}}, marks=pytest.mark.whole),
        ("shared", {"a_sync": True}),
    ],
    ids=["own", "own, GeoSGD", "shared"],
)
@pytest.mark.usefixtures("namespaces")
def test_servers_are_hosts(placement: str, strategy: dict[str, Any]) -> None:
    """Each server is in a network of its own, or in that of its node; the run says so, and knows how stale its gradients were."""
    seen: dict[str, str] = {}

    def look(step: int, _total: int) -> None:
        if step >= 2 and len(seen) < 4:
            seen.update(networks_of(psutil.Process().children(recursive=True)))

    with Session(box(strategy, placement)) as session:
        result = session.run(Leg(strategy=session._experiment.strategy, steps=STEPS, warmup_steps=2, start="initial"), look)
    assert set(seen) == {"server 0", "server 1", "rank 0", "rank 1"}
    shared = placement == "shared"
    assert (seen["server 0"] == seen["rank 0"], seen["server 1"] == seen["rank 1"]) == (shared, shared)
    assert len(set(seen.values())) == (2 if shared else 4)
    assert os.readlink("/proc/self/ns/net") not in seen.values()  # noqa: PTH115  # a magic link, not a path
    assert result.testbed is not None
    assert {entry["link"] for entry in result.testbed["links"]} == {f"host{number}" for number in range(2 if shared else 4)}
    assert not {entry["what"] for entry in result.summary.skipped} & {"cluster.servers", "cluster.server_placement", "cluster.nodes"}
    assert result.summary.staleness is not None
    assert result.summary.server_load is not None


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_the_links_change_nothing_but_the_time() -> None:
    """Synchronous training has the losses that it has on loopback; a step lasts as long as its bytes need there and back."""
    there = measure(box({}))
    here = measure(box({}, launcher="local"))
    assert list(there.steps["loss"]) == pytest.approx(list(here.steps["loss"]), abs=1e-5)
    workload = there.experiment.workload
    nbytes = 4 * sum(parameter.numel() for parameter in build_model(workload.model, workload.model_options, workload.dtype, 0).parameters())
    assert there.summary.step_s["p50"] > 0.97 * 2 * 8 * nbytes / PAYLOAD_BPS
    assert here.summary.step_s["p50"] < there.summary.step_s["p50"]


def _gone(before: set[str]) -> bool:
    """Whether all namespaces that came since are gone, soon."""
    deadline = time.monotonic() + 10
    while _networks() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    return not _networks() - before


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_a_killed_server_is_named_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers, ranks and namespaces: the session ends them all."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a failed launch keeps its logs for the user; here they go with the test
    before = _networks()
    happened: list[int] = []

    def strike(step: int, _total: int) -> None:
        if step >= 2 and not happened:
            happened.append(step)
            (victim,) = (
                one for one in found("real.servers.leg_servers", psutil.Process().children(recursive=True)) if one.cmdline()[-1] == "1"
            )
            victim.kill()

    experiment = box({"a_sync": True}, steps=2000)
    with pytest.raises(WorkerFailed, match="server 1: was killed by SIGKILL"), Session(experiment) as session:
        session.run(Leg(strategy=experiment.strategy, steps=2000, warmup_steps=0, start="initial"), strike)
    assert happened
    assert not found("real.servers.leg_servers", psutil.Process().children(recursive=True))
    assert _gone(before)
