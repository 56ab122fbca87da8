"""What every test may rely on, and what every test is held to."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("plan.contract")
settings.register_profile(
    "fleetbench",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.differing_executors],  # a contract's tests are inherited, and nothing is replayed from a database
)
settings.load_profile("fleetbench")


_SET_BY_LIBRARIES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # by pytest, and by torch when its compiler is first imported


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--slow``."""
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests unless asked; skip, by name, what this machine cannot do."""
    skips = {}
    if not config.getoption("--slow"):
        skips["slow"] = pytest.mark.skip(reason="SKIPPED: slow; `make test-all` runs it (--slow)")
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        skips["gpu"] = pytest.mark.skip(reason="SKIPPED: no CUDA device")
    if os.geteuid() != 0:
        skips["root"] = pytest.mark.skip(reason="SKIPPED: not root")
    for item in items:
        for name, skip in skips.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a child process, a thread or an environment variable behind."""
    me = psutil.Process()
    children, threads, environment = set(me.children(recursive=True)), set(threading.enumerate()), dict(os.environ)
    yield
    left_children = [child for child in me.children(recursive=True) if child not in children and _lives(child)]
    left_threads = [thread for thread in threading.enumerate() if thread not in threads and not thread.daemon]
    changed = {
        name: os.environ.get(name)
        for name in environment.keys() | os.environ.keys()
        if name not in _SET_BY_LIBRARIES and environment.get(name) != os.environ.get(name)
    }
    assert not left_children, f"left behind: processes {left_children}"
    assert not left_threads, f"left behind: threads {left_threads}"
    assert not changed, f"left behind: environment variables {changed}"


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
