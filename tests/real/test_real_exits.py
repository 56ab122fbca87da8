"""What a process knows of its own end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from real.processes.failures import ExitWatch

SCRIPT = """
import atexit, sys
from real.processes.failures import ExitWatch
watch = ExitWatch()
atexit.register(lambda: print("failed" if watch.has_failed else "well"))
"""


@pytest.mark.parametrize(
    ("end", "word"),
    [
        ("pass", "well"),
        ("sys.exit()", "well"),
        ("sys.exit(0)", "well"),
        ("sys.exit(1)", "failed"),
        ("sys.exit('no data')", "failed"),
        ("1 / 0", "failed"),
    ],
)
def test_a_process_knows_at_its_exit_whether_it_has_failed(end: str, word: str) -> None:
    """As its exit code says, which is not known yet."""
    done = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.strip() == word
    assert (done.returncode == 0) == (word == "well")


def test_the_watch_takes_itself_out() -> None:
    """``sys.exit`` is what it was before, and still exits in the meantime."""
    before = sys.exit
    watch = ExitWatch()
    with pytest.raises(SystemExit) as raised:
        sys.exit(3)
    assert raised.value.code == 3
    assert watch.has_failed
    watch.end()
    assert sys.exit is before
