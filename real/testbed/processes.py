"""Processes: one process of gloo on each of several hosts, which are told what to do and answer, a line of JSON each."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetbench.children import bound
from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.launch import QUIET
from real.processes.diagnosis import first_to_blame, how_it_ended
from real.testbed.ground import Testbed

PROGRAM = ("-m", "real.testbed.rank")
_WITHIN_S = 120.0
_ENDING_S = 1.0


class Processes:
    """Ranks by number. States: running, from the constructor on; ended, after ``end``. They end with this process, too."""

    def __init__(self, testbed: Testbed, folder: Path, hosts: Sequence[str], program: Sequence[str] = PROGRAM) -> None:
        """One rank for each entry of ``hosts``; ``folder`` takes their log. ``program``: Python's arguments of what answers as ours do."""
        self.hosts = tuple(hosts)
        self.running: list[subprocess.Popen[bytes]] = []
        self._log = folder / "ranks.log"
        command = testbed.command([sys.executable, "-P", *program], self.hosts)
        base = {**os.environ, **QUIET, **testbed.environment}
        try:
            with self._log.open("ab") as log:
                for rank in range(len(self.hosts)):
                    self.running.append(
                        subprocess.Popen(
                            bound(command),
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            stderr=log,
                            start_new_session=True,  # Ctrl-C reaches the driver alone
                            env={**base, "RANK": str(rank)},
                        )
                    )
            self.answers()
        except BaseException:
            self.end()
            raise

    def tell(self, rank: int, request: Mapping[str, Any]) -> None:
        """Send a request; who has ended is named where its answer is missing."""
        stdin = self.running[rank].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """One answer of every rank. Raises ``WorkerFailed`` naming the rank that has ended first."""
        texts = [b""] * len(self.running)
        deadline = time.monotonic() + _WITHIN_S
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self.running):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = " ".join(str(key.data) for key in selector.get_map().values())
                    raise EnvironmentLacks("gloo does not answer", "testbed", f"ranks {missing}", self._last_words())
                for key, _ in ready:
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        raise self._ended(key.data)
                    texts[key.data] += part
                    if part.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return [json.loads(text) for text in texts]

    def end(self) -> None:
        """End them all; returns when they are gone."""
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.running.clear()

    def _ended(self, closed: int) -> WorkerFailed:
        """Who ended first: the others fail a moment later, because of it. ``closed``: a rank that answers no more, reaped or not."""
        deadline = time.monotonic() + _ENDING_S
        for process in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        codes = {rank: process.returncode for rank, process in enumerate(self.running) if process.returncode is not None}
        rank = first_to_blame(codes) if codes else closed
        how = how_it_ended(codes[rank]) if codes else "answers no more"
        return WorkerFailed(how, f"rank {rank} on {self.hosts[rank]}", None, self._last_words())

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"the ranks' last words: {' | '.join(lines[-3:]) or 'none'}"
