"""How a script ends after its last leg, in processes of their own: with code 0, whatever it does against it."""

from __future__ import annotations

import pytest
from processes import Ended, run_each_end

HEAD = "import sys, threading, time\nfrom real.job.driver_watch import end_script\n\nprint('trained')"
SCRIPTS = {
    "lets it pass": "end_script(grace_s=0.5)",
    "catches exceptions": "try:\n    end_script(grace_s=0.5)\nexcept Exception:\n    sys.exit(5)",
    "swallows it, and goes on for ever": "try:\n    end_script(grace_s=0.5)\nexcept:\n    pass\nwhile True:\n    time.sleep(0.01)",
    "has a thread that is no daemon": "threading.Thread(target=time.sleep, args=(60,)).start()\nend_script(grace_s=0.5)",
    "waits in its finally": "try:\n    end_script(grace_s=0.5)\nfinally:\n    time.sleep(60)",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How each script ended."""
    return dict(zip(SCRIPTS, run_each_end(HEAD, list(SCRIPTS.values()), tmp_path_factory.mktemp("ends")), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_it_ends_with_code_0(ended: dict[str, Ended], script: str) -> None:
    """Within seconds, and what it has printed is there."""
    assert (ended[script].code, ended[script].out) == (0, "trained\n"), ended[script].err
