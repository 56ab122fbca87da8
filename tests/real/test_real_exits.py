"""What a process knows of its own end."""

from __future__ import annotations

import sys

import pytest
from processes import Ended, run_each_end

from real.processes.failures import ExitWatch

SCRIPT = """
import atexit, sys
from real.processes.failures import ExitWatch

watch = ExitWatch()
atexit.register(lambda: print("failed" if watch.has_failed else "well"))
"""


ENDS = {
    "pass": "well",
    "sys.exit()": "well",
    "sys.exit(0)": "well",
    "sys.exit(1)": "failed",
    "sys.exit('no data')": "failed",
    "1 / 0": "failed",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How a script with each of the ends ended."""
    return dict(zip(ENDS, run_each_end(SCRIPT, list(ENDS), tmp_path_factory.mktemp("ends")), strict=True))


@pytest.mark.parametrize(("end", "word"), ENDS.items())
def test_a_process_knows_at_its_exit_whether_it_has_failed(ended: dict[str, Ended], end: str, word: str) -> None:
    """As its exit code says, which is not known yet."""
    assert ended[end].out.strip() == word
    assert (ended[end].code == 0) == (word == "well")


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
