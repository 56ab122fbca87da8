"""Client: the driver's end of the keeper."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from fleetbench.children import bound
from fleetbench.errors import EnvironmentLacks
from real.testbed.keeper import ROOTLESS
from real.testbed.network import TOOL_PATH

_START_S = 20.0
_END_S = 5.0
_HINT = "needs Linux with network namespaces, as root or with user namespaces allowed, and ip and tc of iproute2"


class Keeper:
    """A running keeper. States: running, from the constructor on; ended, after ``close``.

    Raises ``EnvironmentLacks`` where this machine has no namespaces for us, or lacks the tools.
    """

    def __init__(self, log: Path, *, rootless: bool | None = None) -> None:
        """``rootless``: in a user namespace; by default only where it does not go without."""
        for tool in ("ip", "tc"):
            if shutil.which(tool, path=TOOL_PATH) is None:
                raise EnvironmentLacks(f"the testbed needs {tool}, and it is not installed", "run.launcher", "'testbed'", _HINT)
        tries = [rootless] if rootless is not None else [False, True] if os.geteuid() == 0 else [True]
        self._log = log
        reasons = []
        for without in tries:
            self.rootless = bool(without)
            self._process = self._start()
            try:
                self.pid = int(self._answer(_START_S)["pid"])
            except EnvironmentLacks as error:
                reasons.append(error.what)
                self.close()
            except BaseException:
                self.close()
                raise
            else:
                return
        raise EnvironmentLacks(f"no network namespace can be made: {'; '.join(reasons)}", "run.launcher", "'testbed'", _HINT)

    def ask(self, request: str, *, within_s: float = 60.0, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer. Raises ``EnvironmentLacks`` where it was refused."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": request, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        return self._answer(within_s)

    def close(self) -> None:
        """End the keeper, and with it all that it holds; returns when it is gone."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_END_S if process.poll() is None else 0)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        process.stdout.close()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                bound([sys.executable, "-P", "-m", "real.testbed.keeper", *([ROOTLESS] if self.rootless else [])]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the driver alone
            )

    def _answer(self, within_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline = time.monotonic() + within_s
        text = b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise EnvironmentLacks("the testbed's keeper does not answer", "run.launcher", "'testbed'", f"its log: {self._log}")
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise self._ended()
                text += part
        answer: dict[str, Any] = json.loads(text)
        if "error" in answer:
            raise EnvironmentLacks(answer["error"], "run.launcher", "'testbed'", _HINT)
        return answer

    def _ended(self) -> EnvironmentLacks:
        said = self._log.read_text(encoding="utf-8", errors="replace").strip()[-500:]
        return EnvironmentLacks(f"the testbed's keeper has ended: {said or 'it said nothing'}", "run.launcher", "'testbed'", _HINT)
