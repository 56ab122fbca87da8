from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
CASES = '''
import os, socket, subprocess, sys, tempfile, threading, time
import pytest

HERE = os.path.dirname(__file__)
GRANDCHILD = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(sleep, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True).pid)
"""
KEPT = []

@pytest.fixture(scope="module")
def held():
    with socket.create_server(("127.0.0.1", 0)):
        folder = tempfile.mkdtemp(prefix="fleetbench-")
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        yield
        process.kill()
        process.wait()
        os.rmdir(folder)

def test_what_a_module_holds(held):
    pass

def test_thread():
    threading.Thread(target=time.sleep, args=(0.3,)).start()

def test_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])

def test_orphan():
    done = subprocess.run([sys.executable, "-c", GRANDCHILD], check=True, stdout=subprocess.PIPE)
    with open(os.path.join(HERE, "orphan"), "wb") as file:
        file.write(done.stdout)

def test_orphan_that_ends():
    subprocess.run([sys.executable, "-c", GRANDCHILD.replace("60", "0.1")], check=True, stdout=subprocess.DEVNULL)

def test_socket():
    KEPT.append(socket.create_server(("127.0.0.1", 0)))

def test_folder():
    tempfile.mkdtemp(prefix="fleetbench-")

def test_variable():
    os.environ["LEFT_BEHIND"] = "1"

def test_clean(monkeypatch):
    monkeypatch.setenv("PUT_BACK", "1")
    subprocess.run([sys.executable, "-c", ""], check=True)
    thread = threading.Thread(target=time.sleep, args=(0,))
    thread.start()
    thread.join()

@pytest.mark.slow
def test_slow():
    pass
'''


def test_a_test_that_leaves_something_behind_fails(tmp_path: Path) -> None:
    """Each thing left over is found, an orphan too; a test that cleans up passes, and so does what a module holds."""
    for name in ("conftest.py", "fork_server.py"):
        shutil.copy(CONFTEST.with_name(name), tmp_path / name)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: takes long\n")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, check=False, env={**os.environ, "COLUMNS": "200", "PYTEST_ADDOPTS": ""}
    )
    os.kill(int((tmp_path / "orphan").read_text()), signal.SIGKILL)
    lines = done.stdout.splitlines()
    left = {
        "test_thread": "threads",
        "test_process": "processes",
        "test_orphan": "orphans",
        "test_socket": "listening sockets",
        "test_folder": "folders",
        "test_variable": "environment variables",
    }
    errors = {line.split("::")[1].split(" ")[0]: line for line in lines if line.startswith("ERROR") and "::" in line}
    assert errors.keys() == left.keys()
    for name, what in left.items():
        assert f"left over: {what}" in errors[name]
    for name in ("test_clean", "test_what_a_module_holds", "test_orphan_that_ends"):
        assert any(line.startswith("PASSED") and line.endswith(f"::{name}") for line in lines)
    assert any(line.startswith("SKIPPED") and "--slow" in line for line in lines)
