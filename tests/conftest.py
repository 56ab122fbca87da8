"""What every test may rely on, and what every test is held to."""

from __future__ import annotations

import gc
import importlib.util
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import psutil
import pytest
from fork_server import forking_workers, shared
from hypothesis import HealthCheck, settings

import real.processes.started

TESTS = Path(__file__).parent
pytest.register_assert_rewrite("plan.contract")
for profile, max_examples in (("short", 25), ("slow", 50), ("whole", 150)):  # of `make test`, `make test-all`, `make test SLOW=--whole`
    settings.register_profile(
        profile,
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=max_examples,
        suppress_health_check=[HealthCheck.differing_executors],  # inherited contracts; no database
    )


_SET_BY_LIBRARIES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK"}


_PATIENCE_S = 0.5
"""An orphan that was told to end, and the folder of one, need not be gone at once."""


def pytest_configure(config: pytest.Config) -> None:
    """Give the session a folder for temporary files of its own: what lies there is ours, and a process that knows it is, too."""
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # pytest's own folders stay where they were
    settings.load_profile("whole" if config.getoption("--whole") else "slow" if config.getoption("--slow") else "short")
    folder = tempfile.mkdtemp(prefix="tests-of-fleetbench-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would all that it starts
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # as a lone trainer sets it
    os.environ.setdefault("FLEETBENCH_BUSY", "accept")  # tests run side by side; those of busy machines set it otherwise
    real.processes.started.start_process = forking_workers(real.processes.started.start_process)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow`` and ``--whole``."""
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")
    parser.addoption("--whole", action="store_true", help="run these, and campaigns whole instead of their samples")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests and what is outside of a sample unless asked, and what this machine cannot do; each says why."""
    skips = {}
    if not config.getoption("--whole"):
        skips["whole"] = pytest.mark.skip(reason="SKIPPED: not of the sample; `make test SLOW=--whole` runs it")
    if not (config.getoption("--slow") or config.getoption("--whole")):
        skips["slow"] = pytest.mark.skip(reason="SKIPPED: slow; `make test-all` runs it (--slow)")
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        skips["gpu"] = pytest.mark.skip(reason="SKIPPED: no CUDA device")
    if importlib.util.find_spec("ray") is None:
        skips["ray"] = pytest.mark.skip(reason="SKIPPED: Ray is not installed; pip install 'fleetbench[ray]'")
    if importlib.util.find_spec("torchft") is None:
        skips["torchft"] = pytest.mark.skip(reason="SKIPPED: torchft is not installed (fleetbench[elastic])")
    if os.geteuid() != 0:
        skips["root"] = pytest.mark.skip(reason="SKIPPED: not root")
    seen = Counter[str]()
    for item in items:
        found = [skip for name, skip in skips.items() if item.get_closest_marker(name)]
        sample = item.get_closest_marker("sample")
        if sample and not found and "slow" in skips:
            name = item.nodeid.partition("[")[0]
            found += [skips["slow"]] * (seen[name] % sample.args[0] != 0)
            seen[name] += 1
        for skip in found:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Compute on one thread: what tests compute is small, and threads that wait for one another take seven times the CPU time of it."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # modules and tests stay: no collection looks at them again


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process, a thread, a listening socket, a folder or an environment variable behind.

    What is there before the test, such as a session that its module's fixture holds, may stay.
    """
    pids, open_sockets, folders = _pids(), _sockets(), _folders()
    threads, environment = set(threading.enumerate()), os.environ._data.copy()  # type: ignore[attr-defined]  # as bytes: a tenth of the time
    yield
    pids |= {server.pid for server in shared}  # it lives as long as this process
    left_children, left_orphans = [], set[object]()
    if _pids() - pids:  # to look for children takes ten times as long
        left_children = [child for child in psutil.Process().children(recursive=True) if child.pid not in pids and _lives(child)]
        left_orphans = _what_stays(lambda: _ours(_pids() - pids - {child.pid for child in left_children}))
    left_folders = _what_stays(lambda: _folders() - folders)
    left_sockets = _listening(_sockets() - open_sockets)
    left_threads = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    now = os.environ._data  # type: ignore[attr-defined]
    names = {os.fsdecode(name) for name, _ in environment.items() ^ now.items()}
    changed = {name: os.environ.get(name) for name in names - _SET_BY_LIBRARIES}
    assert not left_children, f"left over: processes {left_children}"
    assert not left_orphans, f"left over: orphans {left_orphans}"
    assert not left_sockets, f"left over: listening sockets {left_sockets}"
    assert not left_folders, f"left over: folders {left_folders}"
    assert not left_threads, f"left over: threads {left_threads}"
    assert not changed, f"left over: environment variables {changed}"


@pytest.fixture
def short_profiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Legs of a profile have 20 steps, not 100: for what needs a profile, however exact."""
    monkeypatch.setattr("real.profile.measuring.STEPS", 20)
    monkeypatch.setattr("real.profile.measuring.Legs.run.__defaults__", (20,))


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _pids() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}  # noqa: PTH208  # before and after every test: a third of the time


def _ours(pids: set[int]) -> dict[int, str]:
    """Command lines of those that were started, however indirectly, with this session's folder for temporary files."""
    mark = f"TMPDIR={tempfile.gettempdir()}".encode()
    found = {}
    for pid in pids:
        process = Path("/proc", str(pid))
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found[pid] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended, or is not ours to read
            continue
    return found


def _sockets() -> set[int]:
    """Open files of this process that are sockets, by number."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  # before and after every test
        try:
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                found.add(number)
        except OSError:  # what the folder was listed with
            continue
    return found


def _listening(numbers: set[int]) -> set[str]:
    """Addresses that this process listens on with one of these open files."""
    if not numbers:
        return set()
    found = psutil.Process().net_connections(kind="tcp")
    return {f"{one.laddr}" for one in found if one.status == psutil.CONN_LISTEN and one.fd in numbers}


def _folders() -> set[Path]:
    folder = Path(tempfile.gettempdir())
    return {folder / name for name in os.listdir(folder) if name.startswith("fleetbench-")}  # noqa: PTH208  # before and after every test


def _what_stays(look: Callable[[], Collection[object]]) -> Collection[object]:
    deadline = time.monotonic() + _PATIENCE_S
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
