"""The fork server: what it forks is as what Python starts, but for the time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fleetbench.errors import EnvironmentLacks
from real.processes import fork_server as module
from real.processes.fork_server import ForkServer, fork_server

TELL = """\
import json, os, sys
had = "torch" in sys.modules
print(json.dumps([__name__, sys.argv, os.getcwd(), os.environ["TELL"], sys.path[0], sys.stdin.read(), had]))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    """One of the tests' own."""
    made = ForkServer({**os.environ, "TELL": "this"})
    yield made
    made.close()


@pytest.fixture
def servers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers that have imported nothing and start at once; those that other tests use stay."""
    monkeypatch.setattr(module, "IMPORTED", ())
    monkeypatch.setattr(module, "shared", made := list[ForkServer]())
    yield
    for server in made:
        server.close()


def _script(tmp_path: Path, text: str, name: str = "script.py") -> str:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_fork_sees_what_a_process_of_its_own_would(server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, arguments, folder, variables, import path, an empty input: as ``python script.py``; torch is there before it asks."""
    script = _script(tmp_path, TELL)
    monkeypatch.chdir(tmp_path)
    assert server.fork([script, "a", "b c"], tmp_path / "log").wait(20) == 0
    forked = json.loads((tmp_path / "log").read_text(encoding="utf-8"))
    environment = {**os.environ, "TELL": "this"}
    run = subprocess.run([sys.executable, script, "a", "b c"], capture_output=True, stdin=subprocess.DEVNULL, env=environment, check=True)
    assert forked[:-1] == json.loads(run.stdout)[:-1]
    assert forked[-1] is True


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('no such thing')", 1, "no such thing\n"),
        ("import sys; sys.exit()", 0, ""),
        ("import os; os.abort()", -signal.SIGABRT, None),
        ("1 / 0", 1, None),
        ("import sys; sys.stdout.close()", 0, ""),
    ],
)
def test_ends_are_those_of_a_process(server: ForkServer, tmp_path: Path, text: str, code: int, said: str | None) -> None:
    """Exit codes, and what is said on the way."""
    assert server.fork([_script(tmp_path, text)], tmp_path / "log").wait(20) == code
    written = (tmp_path / "log").read_text(encoding="utf-8")
    assert written == said if said is not None else "ZeroDivisionError" in written or code < 0


def test_two_forks_at_once_are_told_apart(server: ForkServer, tmp_path: Path) -> None:
    """Who ends first, and who was killed."""
    sleeps = (_script(tmp_path, f"import time; time.sleep({time_s})", f"sleep{time_s}.py") for time_s in (60, 0))
    waits, ends = (server.fork([script], tmp_path / "log") for script in sleeps)
    assert ends.wait(20) == 0
    assert waits.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(0.1)
    waits.kill()
    assert waits.wait(20) == -signal.SIGKILL


def test_a_log_that_cannot_be_written_ends_no_server(server: ForkServer, tmp_path: Path) -> None:
    """The error names the log, and the next fork is as good as any."""
    script = _script(tmp_path, "")
    with pytest.raises(EnvironmentLacks, match=r"nowhere/workerlog\.3"):
        server.fork([script], tmp_path / "nowhere" / "workerlog.3")
    assert server.fork([script], tmp_path / "log").wait(20) == 0


@pytest.mark.usefixtures("servers_of_its_own")
@pytest.mark.parametrize("struck", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_server_takes_its_forks_with_it(struck: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They end at once, say so, and the next that is asked for is another; so it is where a variable has changed."""
    first = fork_server({**os.environ, "TELL": "one"})
    fork = first.fork([_script(tmp_path, "import time; time.sleep(60)")], tmp_path / "log")
    process = psutil.Process(fork.pid)
    os.kill(first.pid, struck)
    assert psutil.wait_procs([process], timeout=10)[1] == []
    assert fork.wait(20) == -signal.SIGKILL
    assert first.code == -struck
    assert "KeyboardInterrupt" not in capfd.readouterr().err  # on its way out through Python it would outlive its forks
    second = fork_server({**os.environ, "TELL": "one"})
    assert second is not first
    assert second is fork_server({**os.environ, "TELL": "one"})
    third = fork_server(os.environ)
    assert third is not second
    assert second.code is not None


@pytest.mark.usefixtures("servers_of_its_own")
def test_what_a_fork_has_started_does_not_hide_the_end_of_its_server(tmp_path: Path) -> None:
    """A process of the fork's own, such as a data loader's, may live on for a while; the fork is known to have ended."""
    server = fork_server(os.environ)
    text = "import os, time\nif child := os.fork(): print(child, flush=True)\ntime.sleep(60)"
    fork = server.fork([_script(tmp_path, text)], tmp_path / "log")
    while not (said := (tmp_path / "log").read_text(encoding="utf-8")):
        time.sleep(0.02)
    os.kill(server.pid, signal.SIGKILL)
    try:
        assert fork.wait(10) == -signal.SIGKILL
    finally:
        os.kill(int(said), signal.SIGKILL)


@pytest.mark.usefixtures("servers_of_its_own")
def test_another_launch_does_not_end_the_forks_of_one_that_runs(tmp_path: Path) -> None:
    """Its variables are others, so it has a server of its own; the first is closed once it is not used, or with this process."""
    first = fork_server({**os.environ, "TELL": "one"})
    fork = first.fork([_script(tmp_path, "import time; time.sleep(60)")], tmp_path / "log")
    assert fork_server(os.environ) is not first
    assert fork.poll() is None
    fork.kill()
    assert fork.wait(20) == -signal.SIGKILL
    assert not first.is_used
    first.close()
