"""A busy machine is noticed, said, measured again, and nothing of it kept; with a real load beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetbench.cli.main import main
from real.testbed.noise import BUSY, TRIES, quietest, watching

EXPERIMENT = """\
name = "busy"
schema = 1

[workload]
model = "digits_mlp"
data = "digits"
steps = 20

[cluster]
nodes = 1
trainers_per_node = 2

[tune]
pairs = 2
trials = 3
finalists = 1
leg_steps = 20
thread_num = [1]
"""
COMPUTES = "import os, sys\nif os.fork(): sys.exit()\nprint(os.getpid(), flush=True)\nos.setsid()\nwhile True: pass"
"""A program of somebody else: its parent ends at once, so that it is nobody's child here."""


@pytest.fixture
def busy_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A core that somebody else computes on."""
    monkeypatch.delenv(BUSY)
    with subprocess.Popen([sys.executable, "-c", COMPUTES], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


def _experiment(tmp_path: Path) -> str:
    path = tmp_path / "busy.toml"
    path.write_text(EXPERIMENT, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("loads", "taken", "kept"),
    [([0.1], 1, 0), ([None], 1, 0), ([0.3, 0.1], 2, 1), ([0.3, 0.9, 0.2], 3, 2), ([0.3, 0.2, 0.9], 3, 1), ([0.2, 0.3, 0.4], 3, 0)],
)
def test_the_quietest_of_three_is_kept(loads: list[float | None], taken: int, kept: int) -> None:
    """Again only where the machine was busy (more than 0.15 cores), and three times at most."""
    seen = iter(enumerate(loads))
    assert quietest(lambda: next(seen), lambda found: found[1]) == (kept, loads[kept])
    assert len(list(seen)) == len(loads) - taken
    assert TRIES == 3


@pytest.mark.alone
@pytest.mark.usefixtures("busy_core")
def test_what_others_compute_is_seen_and_what_is_ours_is_not() -> None:
    """Somebody else's core is, and a child of this process is not; one that bears the mark is not either."""
    burn = "import time\nend = time.process_time() + 1.5\nwhile time.process_time() < end: pass"
    begin_s, before_s = time.perf_counter(), sum(os.times()[2:4])
    with watching() as load:
        subprocess.run([sys.executable, "-c", burn], check=True)
    own_cores = (sum(os.times()[2:4]) - before_s) / (time.perf_counter() - begin_s)
    assert load.cores is not None
    assert 0.15 < load.cores < (os.cpu_count() or 1) - own_cores + 0.3  # more than what the child left would be the child's


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.usefixtures("busy_core", "short_profiles")
def test_a_real_run_beside_a_busy_core_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It and its profile are measured again; the profile is not kept, and summary and report say what it was."""
    monkeypatch.setattr("real.testbed.noise.TRIES", 2)
    out = tmp_path / "runs"
    more = ["--set", "workload.steps=100"]  # a second of them: what a shorter run saw of others counts for less
    assert main(["real", _experiment(tmp_path), *more, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "warning: the profile was measured on a busy machine: other programs used" in said.err
    assert "warning: measured on a busy machine: other programs used" in said.err
    assert [path.name.endswith(".busy.toml") for path in (out / "profiles").iterdir()] == [True]
    (run,) = out.glob("busy-real-*")
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["foreign_cores"] > 0.15
    assert main(["report", str(run)]) == 0
    assert "measured on a busy machine" in (run / "report.html").read_text(encoding="utf-8")
