from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
CASES = """
import os, subprocess, sys, threading, time
import pytest

def test_thread():
    threading.Thread(target=time.sleep, args=(0.3,)).start()

def test_process():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])

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
"""


def test_a_test_that_leaves_something_behind_fails(tmp_path: Path) -> None:
    """A thread, a process and a variable are each found; a test that cleans up passes; a slow one is skipped by name."""
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: takes long\n")
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    lines = done.stdout.splitlines()
    for name, what in (("test_thread", "threads"), ("test_process", "processes"), ("test_variable", "environment variables")):
        assert any(line.startswith("ERROR") and name in line for line in lines)
        assert f"AssertionError: left behind: {what}" in done.stdout
    assert any(line.startswith("PASSED") and "test_clean" in line for line in lines)
    assert not any(line.startswith("ERROR") and "test_clean" in line for line in lines)
    assert any(line.startswith("SKIPPED") and "--slow" in line for line in lines)
