"""JSON lines: a child process reads requests, one line of JSON each, and answers each with one."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetbench.children import bound


class Silent(Exception):  # noqa: N818  # says what happened
    """Children do not answer in time; the arguments are their places."""


class Ended(Exception):  # noqa: N818  # says what happened
    """A child answers no more; the argument is its place."""


class Child:
    """A process that runs ``serve``. States: running, from the constructor on; ended, after ``end``. It ends with this process, too."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        """``log``: takes its errors; Ctrl-C reaches this process alone."""
        pipe = subprocess.PIPE
        with log.open("ab") as errors:
            self.process = subprocess.Popen(bound(command), stdin=pipe, stdout=pipe, stderr=errors, start_new_session=True, env=environment)

    def tell(self, request: Mapping[str, Any]) -> None:
        """Send a request; a child that has ended is found where its answer is missing."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()

    def end(self, patience_s: float = 0.0) -> None:
        """End its input, and kill it after ``patience_s``; returns when it is gone."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def answers(children: Sequence[Child], within_s: float) -> list[Any]:
    """One answer of every child. Raises ``Silent`` and ``Ended``."""
    texts = [b""] * len(children)
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        for place, child in enumerate(children):
            assert child.process.stdout is not None
            selector.register(child.process.stdout, selectors.EVENT_READ, place)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Silent(*(key.data for key in selector.get_map().values()))
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    raise Ended(key.data)
                texts[key.data] += part
                if part.endswith(b"\n"):
                    selector.unregister(key.fileobj)
    return [json.loads(text) for text in texts]


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """In the child: say ``{}`` when ready, then answer requests until the input ends. What it prints goes to its errors."""
    sent = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    reply: Any = {}
    while True:
        sent.write(json.dumps(reply) + "\n")
        sent.flush()
        line = sys.stdin.readline()
        if not line:
            return
        reply = answer(json.loads(line))
