"""Ranks of stock gloo on the hosts of a testbed, one long-lived process each, that answer requests: for measure.py, awake.py and ddp.py.

A rank reads requests, one line of JSON each, and answers each with one. ``python reports/testbed/ranks.py`` is one rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from fleetbench.children import bound
from fleetbench.errors import EnvironmentLacks, WorkerFailed
from real.processes.diagnosis import how_it_ended
from real.processes.started import QUIET
from real.testbed import link_shaping
from real.testbed.testbed import Testbed
from real.testbed.topology import wire_s

SIZES = (100_000, 250_000, 500_000, 1_000_000, 4_000_000)
"""Bytes of the all-reduces that are compared with the closed form."""
PROGRAM = (str(Path(__file__).resolve()),)
_TIMEOUT = timedelta(seconds=60)
_WITHIN_S = 120.0
_ENDING_S = 1.0
_LEAD_NS = 50_000_000
"""Ranks are told this much ahead when to start."""
_SETTLE_NS = 10_000_000
_TARGET_S = 1.5
_FEWEST, _MOST = 5, 60


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


class Processes:
    """A process on each of several hosts. States: running, from the constructor on; ended, after ``end``. They end with this one, too."""

    def __init__(self, testbed: Testbed, folder: Path, hosts: Sequence[str], program: Sequence[str] = PROGRAM) -> None:
        """One rank for each entry of ``hosts``; ``folder`` takes their log. ``program``: Python's arguments of what answers as ours do."""
        self.hosts = tuple(hosts)
        self.running: list[Child] = []
        self._log = folder / "ranks.log"
        command = testbed.command([sys.executable, "-P", *program], self.hosts)
        base = {**os.environ, **QUIET, **testbed.environment}
        try:
            for rank in range(len(self.hosts)):
                self.running.append(Child(command, self._log, {**base, "RANK": str(rank)}))
            self.answers()
        except BaseException:
            self.end()
            raise

    def tell(self, rank: int, request: Mapping[str, Any]) -> None:
        """Send a request; a rank that has ended is named where its answer is missing."""
        self.running[rank].tell(request)

    def answers(self) -> list[dict[str, Any]]:
        """One answer of every rank. Raises ``WorkerFailed`` naming the rank that has ended first."""
        try:
            return answers(self.running, _WITHIN_S)
        except Silent as silent:
            missing = " ".join(map(str, silent.args))
            raise EnvironmentLacks("gloo does not answer", "testbed", f"ranks {missing}", self._last_words()) from None
        except Ended as ended:
            raise self._ended(ended.args[0]) from None

    def end(self) -> None:
        """End them all; returns when they are gone."""
        for child in self.running:
            child.process.kill()
        for child in self.running:
            child.end()
        self.running.clear()

    def _ended(self, closed: int) -> WorkerFailed:
        """Who ended first: the others fail a moment later, because of it. ``closed``: a rank that answers no more, reaped or not."""
        deadline = time.monotonic() + _ENDING_S
        for child in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, deadline - time.monotonic()))
        ended = {rank: child.process.returncode for rank, child in enumerate(self.running)}
        codes = {rank: code for rank, code in ended.items() if code is not None}
        rank = min(codes, key=lambda rank: (codes[rank] >= 0, rank)) if codes else closed
        how = how_it_ended(codes[rank]) if codes else "answers no more"
        return WorkerFailed(how, f"rank {rank} on {self.hosts[rank]}", None, self._last_words())

    def _last_words(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f"the ranks' last words: {' | '.join(lines[-3:]) or 'none'}"


def reshape(testbed: Testbed, rate_bps: int) -> None:
    """Give every link another rate; only connections that are made afterwards follow the model."""
    wires = tuple(dataclasses.replace(wire, rate_bps=rate_bps) for wire in testbed.topology.wires)
    testbed.topology = dataclasses.replace(testbed.topology, wires=wires)
    testbed.apply(link_shaping.shape(wires))


class Ranks:
    """Processes of gloo, one for each entry of ``hosts``. A context manager: inside they run, behind it they are gone."""

    def __init__(self, testbed: Testbed, folder: Path, hosts: Sequence[str] | None = None) -> None:
        self._testbed = testbed
        self._folder = folder
        self._hosts = tuple(hosts or testbed.topology.hosts)
        self.processes: Processes

    def __enter__(self) -> Self:
        self.processes = Processes(self._testbed, self._folder, self._hosts)
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.end()

    def open(self, groups: Sequence[Sequence[int]] | None = None) -> None:
        """Join ranks in groups, by default all in one; connections are made anew."""
        for group in groups or [range(len(self._hosts))]:
            store = self._folder / f"gloo-{secrets.token_hex(8)}"  # an old store would hand out addresses of ranks that are gone
            for place, rank in enumerate(group):
                self.processes.tell(rank, {"do": "open", "store": str(store), "rank": place, "size": len(group)})
        self.processes.answers()

    def all_reduce(self, nbytes: int, *, rounds: int, idle_s: float = 0.0, expected_s: float = 0.0) -> list[float]:
        """Seconds of each of ``rounds`` all-reduces of ``nbytes``, from the first rank's begin to the last one's end.

        Back to back, or each after ``idle_s`` without traffic, where ``expected_s`` says how long one takes.
        Raises ``WorkerFailed`` for a wrong sum.
        """
        period_ns = round(1e9 * (idle_s + 1.3 * expected_s)) + _SETTLE_NS if idle_s else 0
        start_ns = time.monotonic_ns() + _LEAD_NS + round(2e9 * expected_s)  # behind an untimed first one
        request = {"do": "all_reduce", "nbytes": nbytes, "rounds": rounds, "start_ns": start_ns, "period_ns": period_ns}
        for rank in range(len(self._hosts)):
            self.processes.tell(rank, request)
        answers = self.processes.answers()
        for rank, answer in enumerate(answers):
            if not answer["right"]:
                raise WorkerFailed("an all-reduce of known numbers gave a wrong sum", f"rank {rank}", f"{nbytes} bytes")
        ends = [max(column) for column in zip(*(answer["end_ns"] for answer in answers), strict=True)]
        begins = [min(column) for column in zip(*(answer["begin_ns"] for answer in answers), strict=True)]
        if not idle_s:
            begins[1:] = ends[:-1]
        return [1e-9 * (end - begin) for begin, end in zip(begins, ends, strict=True)]

    def medians(self, rate_bps: int, *, sizes: Sequence[int] = SIZES, idle_s: float = 0.0) -> dict[int, float]:
        """Median time by size, over about a second and a half each; ``rate_bps`` says how many rounds that will be."""
        found = {}
        for nbytes in sizes:
            wire = wire_s(nbytes, len(self._hosts), rate_bps)
            rounds = min(_MOST, max(_FEWEST, round(_TARGET_S / (wire + idle_s))))
            found[nbytes] = statistics.median(self.all_reduce(nbytes, rounds=rounds, idle_s=idle_s, expected_s=wire))
        return found


def main() -> None:
    """Serve one rank."""
    import torch
    import torch.distributed as dist

    from real.processes.joining import join
    from real.processes.roles import Role

    torch.set_num_threads(1)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "all_reduce":
            return _all_reduces(request["nbytes"], request["rounds"], request["start_ns"], request["period_ns"])
        if dist.is_initialized():
            dist.destroy_process_group()
        join(Role(rank=request["rank"], trainers=request["size"], store=request["store"]), _TIMEOUT, "gloo")
        dist.barrier()
        return {}

    serve(answer)


def _all_reduces(nbytes: int, rounds: int, start_ns: int, period_ns: int) -> dict[str, Any]:
    """Time all-reduces that start back to back, or each at its own moment of the machine's monotonic clock."""
    import torch
    import torch.distributed as dist

    data = torch.full((nbytes // 4,), dist.get_rank() + 1.0)
    dist.all_reduce(data)
    size = dist.get_world_size()
    right = bool((data == size * (size + 1) / 2).all())
    data.zero_()
    begin_ns, end_ns = [], []
    for number in range(rounds):
        if number == 0 or period_ns:
            time.sleep(max(0.0, (start_ns + number * period_ns - time.monotonic_ns()) * 1e-9))
        begin_ns.append(time.monotonic_ns())
        dist.all_reduce(data)
        end_ns.append(time.monotonic_ns())
    return {"right": right, "begin_ns": begin_ns, "end_ns": end_ns}


if __name__ == "__main__":
    main()
