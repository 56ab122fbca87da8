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
from fork_server import ForkServer

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
