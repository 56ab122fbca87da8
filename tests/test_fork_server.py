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

import fork_server as module
import pytest
from fork_server import ForkServer, fork_server

from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.processes.place import process_state

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


@pytest.mark.slow
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


@pytest.mark.slow
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
def test_a_killed_server_is_replaced(struck: signal.Signals, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its forks go on, and tell how they end; so it is where a variable has changed."""
    first = fork_server({**os.environ, "TELL": "one"})
    fork = first.fork([_script(tmp_path, "import time; time.sleep(60)")], tmp_path / "log")
    os.kill(first.pid, struck)
    while first.code is None:
        time.sleep(0.01)
    assert first.code == -struck
    assert "KeyboardInterrupt" not in capfd.readouterr().err
    second = fork_server({**os.environ, "TELL": "one"})
    assert second is not first
    assert second is fork_server({**os.environ, "TELL": "one"})
    third = fork_server(os.environ)
    assert third is not second
    assert second.code is not None
    assert fork.poll() is None
    fork.kill()
    assert fork.wait(20) == -signal.SIGKILL
    with pytest.raises(WorkerFailed, match="forks ranks has ended"):
        second.fork([_script(tmp_path, "")], tmp_path / "log")


def test_forks_and_their_server_end_with_the_process_that_uses_them(tmp_path: Path) -> None:
    """However it ends."""
    sleeps = _script(tmp_path, "import time; time.sleep(60)", "sleep.py")
    user = f"""\
import os, signal
from pathlib import Path
import sys
sys.path.insert(0, {str(Path(module.__file__).parent)!r})
import fork_server as module
module.IMPORTED = ()
server = module.fork_server(os.environ)
print(server.pid, server.fork([{sleeps!r}], Path({str(tmp_path / "log")!r})).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", user], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    for pid in map(int, done.stdout.split()):
        deadline = time.monotonic() + 10
        while process_state(pid) not in ("", "Z"):
            assert time.monotonic() < deadline, pid
            time.sleep(0.01)
