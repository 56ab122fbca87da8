"""Faults: a worker that dies or stops ends the run, is named, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import faults
import psutil
import pytest
from faults import Fault
from fork_server import shared
from processes import server_of_tests

from fleetbench.errors import ConfigError, WorkerFailed
from fleetbench.experiment import Experiment
from real.job.folder import Beat
from real.job.launcher import launch_script
from real.job.session import Session
from real.leg import Leg
from real.processes.diagnosis import RankError, diagnose
from real.processes.place import sweep

LEG = Leg(steps=100_000, warmup_steps=0)
SCRIPT = Path(__file__).with_name("struck_script.py")
TIMEOUT_S = 30.0
"""Of a collective in the script; a dead worker must be found out well before."""
FAULTS = [Fault(rank, place, step) for place, step in (("start", 0), ("bucket", 3), ("averaging", 5)) for rank in (0, 1)]
OFF = (Fault(2, "start"), Fault(0, "bucket", 99), Fault(1, "averaging", 4))
"""The same places, where no worker comes by: no such rank, no such step, and a step that does not average."""


@pytest.fixture(autouse=True)
def kept_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed launch keeps its logs for the user; here they go with the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def _experiment(**run: object) -> Experiment:
    return Experiment.from_dict(
        {
            "workload": {"model": "mlp", "data": "synthetic", "batch_size": 8, "steps": 10},
            "cluster": {"trainers_per_node": 2},
            "run": {"timeout": "5 s", **run},
        }
    )


def _workers() -> dict[int, psutil.Process]:
    """The forks that are ranks, by rank."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since
            words = process.name().split()
            if words[:1] == ["rank"]:
                found[int(words[1])] = process
    return found


def _strike(rank: int, how: signal.Signals, happened: list[int]) -> Callable[[int, int], None]:
    """A progress callback that sends ``how`` to a rank once training is under way."""

    def progress(step: int, _total: int) -> None:
        if step >= 20 and not happened:
            _workers()[rank].send_signal(how)
            happened.append(step)

    return progress


def test_a_killed_worker_is_named_with_its_signal() -> None:
    """SIGKILL in the middle of a leg: rank and signal are in the error, within seconds, and no process stays."""
    happened: list[int] = []
    begin = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"rank 1: was killed by SIGKILL at step \d+") as caught, Session(_experiment()) as session:
        session.run(LEG, _strike(1, signal.SIGKILL, happened))
    assert happened
    assert caught.value.exit_code == 4
    assert time.monotonic() - begin < 60
    assert not _workers()


@pytest.mark.slow
def test_without_the_fault_the_same_leg_goes_on() -> None:
    """The counterpart: nobody strikes, and the leg ends well."""
    with Session(_experiment()) as session:
        result = session.run(Leg(steps=60, warmup_steps=0))
    assert result.summary.steps == 60


def _launch_struck(tmp_path: Path, *planned: Fault) -> Path:
    """Run the script with faults on two workers; where a struck one leaves its mark."""
    mark = tmp_path / "struck.json"
    launch_script(2, [str(SCRIPT), str(mark), faults.encode(planned), str(TIMEOUT_S)], log_dir=tmp_path / "log", echo=lambda _: None)
    return mark


@pytest.mark.sample(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"rank {fault.rank}, {fault.place}")
@pytest.mark.usefixtures("forked_launches")
def test_a_worker_killed_anywhere_is_named(tmp_path: Path, fault: Fault) -> None:
    """Before it joins, with a bucket in flight, with an averaging in flight: rank and signal, within the timeout, and nobody stays."""
    with pytest.raises(WorkerFailed, match=f"rank {fault.rank}: was killed by SIGKILL") as caught:
        _launch_struck(tmp_path, fault)
    struck = faults.happened(fault, tmp_path / "struck.json")
    assert time.time() - struck["time_s"] < TIMEOUT_S
    assert caught.value.exit_code == 4
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= {server.pid for server in shared}
    assert not list(Path(tempfile.gettempdir()).glob("fleetbench-*"))


@pytest.mark.usefixtures("forked_launches")
def test_with_the_faults_off_the_same_script_ends_well(tmp_path: Path) -> None:
    """Nobody is struck, and whoever asserts that somebody was fails."""
    mark = _launch_struck(tmp_path, *OFF)
    for fault in (*FAULTS, *OFF):
        with pytest.raises(AssertionError, match="nobody was struck"):
            faults.happened(fault, mark)


@pytest.mark.slow
def test_a_stopped_worker_is_named_after_the_timeout() -> None:
    """SIGSTOP: the other rank runs into its timeout, but the silent one is blamed, and it is gone afterwards."""
    happened: list[int] = []
    with pytest.raises(WorkerFailed, match="rank 0: was stopped and did not answer"), Session(_experiment()) as session:
        session.run(LEG, _strike(0, signal.SIGSTOP, happened))
    assert happened
    assert not _workers()


def test_an_interrupt_ends_the_workers() -> None:
    """Ctrl-C reaches the driver only; leaving the session kills the workers."""

    def progress(step: int, _total: int) -> None:
        if step >= 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Session(_experiment()) as session:
        session.run(LEG, progress)
    assert not _workers()


@pytest.mark.slow
def test_a_killed_driver_leaves_no_worker(tmp_path: Path) -> None:
    """SIGKILL of the driver: the kernel ends the workers, and the next start takes its folder away."""
    script = tmp_path / "driver.py"
    script.write_text(
        "import tempfile\ntempfile.tempdir = None\n"  # what has imported torch has asked for it
        "from real.job.session import Session\nfrom real.leg import Leg\nfrom fleetbench.experiment import Experiment\n"
        "w = {'model': 'mlp', 'data': 'synthetic', 'batch_size': 8}\n"
        "e = Experiment.from_dict({'workload': w, 'cluster': {'trainers_per_node': 2}})\n"
        "def p(step, total):\n    if step > 5: print('training', flush=True)\n"
        "with Session(e) as s: s.run(Leg(steps=1000000), p)\n"
    )
    server, variables = server_of_tests()
    driver = server.fork([str(script)], tmp_path / "said", {**variables, "TMPDIR": str(tmp_path)})
    while driver.poll() is None and "training\n" not in (tmp_path / "said").read_text(encoding="utf-8"):
        time.sleep(0.02)
    children = psutil.Process(driver.pid).children(recursive=True)
    assert len(children) >= 3
    driver.kill()
    assert driver.wait() == -signal.SIGKILL
    _, alive = psutil.wait_procs(children, timeout=10)
    for process in alive:
        process.kill()
    assert not alive
    sweep(tmp_path)  # as the next start does
    assert not list(tmp_path.glob("fleetbench-*"))


def test_what_only_a_worker_finds_out_is_still_a_configuration_error() -> None:
    """A batch that no epoch can fill is refused by the workers, and ends as the user's error, not as theirs."""
    experiment = _experiment()
    large = dataclasses.replace(experiment.workload, batch_size=100_000)
    with pytest.raises(ConfigError, match=r"workload\.batch_size"), Session(experiment.replace(workload=large)) as session:
        session.run(LEG)


def test_nothing_listens_beyond_the_loopback_interface() -> None:
    """While a launch trains, none of its processes has a socket that listens on another interface."""
    seen: list[str] = []

    def progress(step: int, _total: int) -> None:
        if step >= 20 and not seen:
            for process in psutil.Process().children(recursive=True):
                seen.extend(c.laddr.ip for c in process.net_connections(kind="inet") if c.status == psutil.CONN_LISTEN)
            seen.append("looked")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Session(_experiment()) as session:
        session.run(LEG, progress)
    assert set(seen) <= {"127.0.0.1", "::1", "looked"}
    assert "looked" in seen


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ({"strategy": {"auto": True}}, "strategy.auto"),
        ({"run": {"launcher": "slurm"}}, "run.launcher"),
        ({"run": {"launcher": "torchrun"}}, "run.launcher"),
        ({"run": {"launcher": "command"}, "workload": {"model": "script:train.py"}}, "workload.model: is a user's script"),
        ({"workload": {"model": "resnet50"}}, "workload.data"),
        ({"workload": {"model_options": {"hiden": 3}}}, "workload.model_options.hiden"),
        ({"workload": {"model": "mlp"}}, "workload.model_options.features"),
        ({"cluster": {"servers": 1}}, "cluster.servers"),
        ({"workload": {"loss_curve": {"start": 2.0, "floor": 0.1, "half_life": "10 steps"}}}, "workload.loss_curve"),
    ],
)
def test_what_is_not_executed_is_refused_by_name(part: dict[str, object], match: str) -> None:
    """A field that real runs do not execute yet is refused before anything starts."""
    with pytest.raises(ConfigError, match=match):
        Session(Experiment.from_dict(part))


BEATS = [Beat(11, 0, 9, 1_000), Beat(12, 0, 7, 500)]


@pytest.mark.parametrize(
    ("codes", "errors", "text"),
    [
        ({0: -15, 1: -9}, {}, "rank 1: was killed by SIGKILL at step 7"),
        ({1: 1}, {}, "rank 1: ended with exit code 1 at step 7"),
        ({1: -15}, {0: RankError("ValueError: x", collective=False, time_ns=2)}, "rank 0: failed at step 9: ValueError: x"),
        (
            {},
            {1: RankError("", collective=False, time_ns=2, config=["too many", "workload.batch_size", "9", "fewer"])},
            "workload.batch_size: too many",
        ),
        ({1: -9}, {0: RankError("connection closed", collective=True, time_ns=2)}, "rank 1: was killed by SIGKILL at step 7"),
        ({}, {0: RankError("timed out", collective=True, time_ns=2)}, "rank 1: stopped answering at step 7"),
        (
            {},
            {0: RankError("connection closed", collective=True, time_ns=1), 1: RankError("ValueError: x", collective=False, time_ns=2)},
            "rank 1: failed at step 7: ValueError: x",
        ),
        (
            {},
            {0: RankError("a", collective=True, time_ns=2), 1: RankError("b", collective=True, time_ns=1)},
            "rank 1: failed in a collective",
        ),
    ],
)
def test_blame_goes_to_who_broke_it(codes: dict[int, int], errors: dict[int, RankError], text: str) -> None:
    """The killed before the failing, the failing before the silent, the silent before those who only noticed."""
    assert str(diagnose(codes, errors, BEATS, 2_000, "log")).startswith(text)
