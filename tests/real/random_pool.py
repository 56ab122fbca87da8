"""A pool of two ranks that trains random cases, and says of each whether it trained as its truth, or was refused."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import re
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fork_server import Forked
from processes import server_of_tests
from random_cases import RANKS, Case

RANK = Path(__file__).with_name("random_rank.py")

READY_S = 90.0
"""For the fork server to import torch, on a busy machine."""
CASE_S = 90.0
"""A rank that has not answered by then hangs."""
LOST_S = 30.0
"""Within which a rank says that it has lost the others; see ``random_rank.TIMEOUT_S``."""
GRACE_S = 8.0
"""So much later than one rank's error another may raise its own."""

EXACT = 1e-8
"""In float64, whichever order sums were taken in."""
ROUNDED = 0.08
"""Share of what training moved, where gradients travel or are computed in 16 bits."""

Answer = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """How a case ended.

    ``equal``, ``refused`` (by an error of fleetbench on every rank), or a failure: ``differs``, ``one rank``
    (ended otherwise than the other), ``raised`` (another exception), ``died``, ``hangs``, ``truths differ``.
    """

    kind: str
    reason: str = ""
    off: float = 0.0

    @property
    def fails(self) -> bool:
        """Whether that is a defect: of the product, or of the truths."""
        return self.kind not in ("equal", "refused")


class Pool:
    """Two living ranks. ``judge`` trains one case; ranks that a case leaves unusable are started again."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[Forked] = []
        self._pipes: list[tuple[Path, ...]] = []
        """By rank: where it reads orders, and where it writes answers."""
        self._orders: list[int] = []
        self._answers: list[queue.Queue[Answer]] = []
        self._threads: list[threading.Thread] = []
        self._generation = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        self._folder.cleanup()

    def judge(self, case: Case) -> Verdict:
        """Train the case on all ranks, and compare."""
        if not self._processes:
            self._start()
        trained = self._order({"do": "train", "case": dataclasses.asdict(case)})
        ends = {answer["end"] for answer in trained}
        if ends == {"trained"}:
            compared = self._order({"do": "compare"})
            if any("off" not in answer for answer in compared):
                self._kill()
                return Verdict("truths differ", f"no truth: {compared[0]} | {compared[1]}")
            off = max(answer["off"] for answer in compared)
            truths = max(answer.get("truths", 0.0) for answer in compared)
            if truths > EXACT:
                return Verdict("truths differ", f"DDP and the algorithm written out are {truths:g} apart", off)
            tolerance = ROUNDED if case.wire or case.amp else EXACT
            return Verdict("equal" if off <= tolerance else "differs", "", off)
        if ends == {"refused"}:
            if any(answer.get("in_flight") for answer in trained):  # each refuses where it is: a process of its own would end now
                self._kill()
            return Verdict("refused", reason_of(trained[0]["what"]))
        self._kill()
        kind = next((end for end in ("hangs", "died", "raised") if end in ends), "one rank")
        return Verdict(
            kind, " | ".join(f"rank {rank} {answer['end']} {reason_of(answer.get('what', ''))}" for rank, answer in enumerate(trained))
        )

    def _order(self, order: dict[str, Any]) -> list[Answer]:
        for orders in self._orders:
            os.write(orders, (json.dumps(order) + "\n").encode())
        answers: dict[int, Answer] = {}
        self._wait(answers, CASE_S, GRACE_S)
        if len(answers) < RANKS:  # a rank that has failed would be gone: the others learn it so, or not at all
            for rank, answer in answers.items():
                if _has_failed(answer):
                    self._processes[rank].kill()
            self._wait(answers, LOST_S, LOST_S)
        return [answers.get(rank, {"end": "hangs"}) for rank in range(RANKS)]

    def _wait(self, answers: dict[int, Answer], patience_s: float, grace_s: float) -> None:
        """For everybody's answer, or as long as is said: after the begin, and after the first failure."""
        deadline = time.monotonic() + patience_s
        while len(answers) < RANKS and time.monotonic() < deadline:
            for rank in range(RANKS):
                if rank not in answers:
                    with contextlib.suppress(queue.Empty):
                        answers[rank] = self._answers[rank].get(timeout=0.005)
            if any(_has_failed(answer) for answer in answers.values()):
                deadline = min(deadline, time.monotonic() + grace_s)

    def _start(self) -> None:
        self._generation += 1
        folder = Path(self._folder.name)
        store = folder / f"store{self._generation}"
        server, variables = server_of_tests()
        self._pipes = [tuple(folder / f"{name}{self._generation}.{rank}" for name in ("orders", "answers")) for rank in range(RANKS)]
        for path in itertools.chain(*self._pipes):
            os.mkfifo(path)
        self._orders = [os.open(orders, os.O_RDWR) for orders, _ in self._pipes]  # to open it for writing alone waits for a reader
        self._processes = [
            server.fork([str(RANK), str(rank), str(RANKS), str(store), *map(str, pipes)], folder / "log", variables)
            for rank, pipes in enumerate(self._pipes)
        ]
        self._answers = [queue.Queue() for _ in range(RANKS)]
        self._threads = [
            threading.Thread(target=_read, args=(pipe, answers), daemon=True)
            for (_, pipe), answers in zip(self._pipes, self._answers, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        for rank, answers in enumerate(self._answers):
            try:
                answers.get(timeout=READY_S)
            except queue.Empty:
                self._kill()
                raise RuntimeError(f"rank {rank} did not start within {READY_S:g} s") from None

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        for _, answers in self._pipes:  # a rank that ended before it opened its pipe has left the thread waiting
            with contextlib.suppress(OSError):
                os.close(os.open(answers, os.O_WRONLY | os.O_NONBLOCK))
        for thread in self._threads:
            thread.join()
        for orders in self._orders:
            os.close(orders)
        self._orders, self._pipes = [], []
        self._processes, self._answers, self._threads = [], [], []


def _has_failed(answer: Answer) -> bool:
    return answer.get("end", "trained") != "trained"


def _read(pipe: Path, answers: queue.Queue[Answer]) -> None:
    with pipe.open(encoding="utf-8") as lines:
        for line in lines:
            answers.put(json.loads(line))
    answers.put({"end": "died"})


def reason_of(what: str) -> str:
    """What was said, without the names, numbers and shapes that belong to one case."""
    text = re.sub(r"^parameters? [\w.]+(, [\w.]+)*:", "parameter:", what.splitlines()[0] if what else "")
    return re.sub(r"rank \d+", "rank R", re.sub(r"\[[^\]]*\]", "[...]", text))[:220]
