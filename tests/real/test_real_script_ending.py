"""How a script ends after its last leg, in processes of their own: with code 0, whatever it does against it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAD = "import sys, threading, time\nfrom real.job.watch import Ending\nending = Ending(grace_s=0.5)\n"
SCRIPTS = {
    "lets it pass": "ending.end()",
    "catches exceptions": "try:\n    ending.end()\nexcept Exception:\n    sys.exit(5)",
    "swallows everything": "while True:\n    try:\n        ending.end()\n    except:\n        pass",
    "swallows it once, and goes on for ever": "try:\n    ending.end()\nexcept:\n    pass\nwhile True:\n    time.sleep(0.01)",
    "has a thread that is no daemon": "threading.Thread(target=time.sleep, args=(60,)).start()\nending.end()",
    "waits in its finally": "try:\n    ending.end()\nfinally:\n    time.sleep(60)",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_it_ends_with_code_0(script: str) -> None:
    """Within seconds, and what it has printed is there."""
    done = subprocess.run(
        [sys.executable, "-c", f"{HEAD}print('trained')\n{script}\n"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
