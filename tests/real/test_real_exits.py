"""What a process knows of its own end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from real.processes.failures import ExitWatch

ENDS = {
    "pass": "well",
    "sys.exit()": "well",
    "sys.exit(0)": "well",
    "sys.exit(1)": "failed",
    "sys.exit('no data')": "failed",
    "1 / 0": "failed",
}
"""How a script ends, and what it should know of that."""
SCRIPT = """
import atexit, os, sys
from real.processes.failures import ExitWatch  # imported once: each end is a fork's
for end in sys.argv[1:]:
    if child := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(end, code, sep="|", flush=True)
    else:
        watch = ExitWatch()
        atexit.register(lambda: print("failed" if watch.has_failed else "well", end="|", flush=True))
        exec(end)
        break
"""


def test_a_process_knows_at_its_exit_whether_it_has_failed() -> None:
    """As its exit code says, which is not known yet."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *ENDS], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    found = [line.split("|") for line in done.stdout.splitlines()]
    assert {end: word for word, end, _ in found} == ENDS
    assert [int(code) == 0 for _, _, code in found] == [word == "well" for word in ENDS.values()]


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
