"""Failures: when one rank of a script fails, all others learn it within seconds, by rank and message.

A rank that waits in a collective learns of nothing before its timeout. So a rank that fails says so in a log,
in the store at which all ranks have met, and a daemon thread of every rank reads that log.

Life cycle: ``watching`` -> ``ended``, when all ranks leave together; or ``watching`` -> ``failed``, when this rank or
another has failed, or a collective broke. A failed process ends after a grace period, whatever the script does, and
never with exit code 0.

An entry of the log is a failure, or a roll call; every rank that reads one answers it, so a rank that was
killed or stopped, or whose host is gone, is known by its missing answer. Entry n is the key ``n``, rank r's
answer ``n/r``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

from fleetbench.errors import ConfigError, WorkerFailed
from real.older_torch import second_connection
from real.processes.diagnosis import Failure, RankError, note_failure
from real.processes.exits import end_now, on_uncaught

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # missing from __all__ only

GRACE_S = 5.0
"""Seconds for a rank to end by itself after another has failed."""
OWN_GRACE_S = 30.0
"""Seconds for the failed rank itself to end, because its script may have to save something."""
_POLL_S = 0.5
_ANSWER_S = 3.0
"""Seconds for the ranks to answer; each checks every ``_POLL_S``."""
_STORE_S = 2.0
"""Additional seconds for the store to answer."""
_LONGEST = 2000
_LEFT_EARLY = "has ended while others still train: its script left early, as by sys.exit, or had fewer batches"
_OF_PEERS = (
    *("Connection closed by peer", "Connection reset by peer", "Timed out waiting", "Wait timeout", "wait timeout"),
    "caused by a remote worker crashing",  # gloo's words, also of a pipe that is broken
    *("NCCL communicator was aborted", "Broken pipe"),
)
"""Parts of torch.distributed's messages about another rank that has ended or does not come."""
_SILENT_STORE = "the job's store does not answer: rank 0 or the launcher that keeps it is gone"

Answer = TypeVar("Answer")


class CollectiveFailed(RuntimeError):  # noqa: N818  # named like ``WorkerFailed``
    """A collective broke, which is usually another rank's fault."""


def is_of_peers(error: BaseException) -> bool:
    """Whether an error is about a broken collective."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, CollectiveFailed) or (isinstance(error, RuntimeError) and any(what in text for what in _OF_PEERS))


def rank_error(error: BaseException) -> RankError:
    """Return the report to a job's driver about an error that ends a rank."""
    arguments = list(error.args) if isinstance(error, ConfigError) else None
    return RankError(f"{type(error).__name__}: {error}", is_of_peers(error), time.monotonic_ns(), arguments)


def abort_collectives() -> None:
    """Abort all collectives of NCCL, whose kernels keep waiting for a dead peer.

    gloo's collectives end with the process.
    """
    if dist.is_initialized() and "cuda:nccl" in dist.get_backend_config().split(","):  # also where no backend was named
        dist.distributed_c10d._abort_process_group()  # noqa: SLF001  # torch has no other name for it


def leave_without_success(grace_s: float = GRACE_S) -> None:
    """Abort collectives and end this process with the exit code of a failed worker."""
    abort = threading.Thread(target=abort_collectives, name="failures-abort", daemon=True)  # which may hang itself
    abort.start()
    abort.join(grace_s)
    end_now(WorkerFailed.exit_code)


class Failures:
    """One rank's view of failures in its job; see the module.

    ``start`` begins to watch; ``end`` or ``leave`` must be called when the process exits. ``store``: the store at
    which all ranks have met. ``step``: returns the step that this rank is at.
    """

    grace_s = GRACE_S

    def __init__(self, store: Store, rank: int, trainers: int, *, step: Callable[[], int]) -> None:
        self.failure: Failure | None = None
        """First failure that this rank knows; a rank's own error takes precedence over a broken
        collective."""
        self._keeps = store  # on rank 0 it may be the store's server, which must outlive the process group
        self._store = second_connection(store, rank)
        self._rank, self._trainers = rank, trainers
        self._step = step
        self._num_read = 0
        self._entry_of_broken: int | None = None
        self._own_entry: int | None = None
        self._has_failed = self._has_broken = self._is_leaving = False
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failures", daemon=True)

    @property
    def has_failed(self) -> bool:
        """Whether this process must not exit with 0, because a collective broke or some rank has failed."""
        return self._has_failed or self.failure is not None or hasattr(sys, "last_value")

    def start(self) -> None:
        """Start watching the other ranks, and announce an exception that ends this process."""
        on_uncaught(self.announce)
        self._thread.start()

    def announce(self, error: BaseException | str) -> None:
        """Announce this rank's failure to all ranks, unless they know of an earlier one."""
        self._has_failed = True
        own = isinstance(error, str) or not is_of_peers(error)
        text = error if isinstance(error, str) else f"failed at step {self._step()}: {type(error).__name__}: {error}"
        self._asked(lambda: self._say(text, own=own), otherwise=None)

    @contextmanager
    def broken(self) -> Iterator[None]:
        """Turn a collective's error into a ``CollectiveFailed`` that names the cause, if it is known."""
        try:
            yield
        except RuntimeError as error:
            self._has_failed = self._has_broken = True
            text = str(error).strip()
            cause = self._asked(lambda: self._cause(text.partition("\n")[0][:200]), otherwise=_SILENT_STORE)
            raise CollectiveFailed(f"{cause}\nThe collective that broke: {text}") from error

    def absent(self, patience_s: float) -> str | None:
        """Call the roll, and describe the ranks that do not answer within ``patience_s`` seconds.

        Return ``None`` if all answer.
        """
        otherwise: str | None = _SILENT_STORE
        return self._asked(lambda: _absence(self._missing(self._append(), patience_s)), otherwise, patience_s)

    def begin_exit(self) -> None:
        """Mark that this process has reached its exit, which may explain others' broken collectives."""
        self._is_leaving = True

    def end(self) -> None:
        """Stop watching, because all ranks leave together."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_POLL_S)

    def leave(self) -> None:
        """Leave after some rank has failed. Returns only if an exception of this process sets the exit code.

        The failed rank ends once the others know of the failure. They wait for ``grace_s``, so that a launcher sees the
        failed rank end first. A rank whose collective broke ends at once, because destroying a group takes as long as
        its running collective.
        """
        ended_by: BaseException | None = getattr(sys, "last_value", None)
        if ended_by is not None and self.failure is None:
            self.announce(ended_by)
        entry = self._own_entry
        if entry is not None and not self._has_broken:
            self._asked(lambda: bool(self._missing(entry)), otherwise=True)
        elif self.failure is not None and self.failure.rank != self._rank and ended_by is None:
            time.sleep(self.grace_s)
        if self._has_broken or ended_by is None:
            why = self.failure or "a collective of its own broke"
            is_own = self.failure is not None and self.failure.rank == self._rank
            text = str(why) if is_own else f"rank {self._rank} ends without success, because {why}"
            print(text, file=sys.stderr)  # noqa: T201  # the worker's log
            leave_without_success()
        abort_collectives()

    def _watch(self) -> None:
        since_s: float | None = None
        said: Failure | None = None
        while not self._ended.wait(_POLL_S):
            with suppress(RuntimeError):  # a store that is gone is noticed by the next collective, which says so
                self._read()
            failure = self.failure
            if failure is None:
                continue
            other = failure.rank != self._rank
            if other and failure != said:
                print(f"rank {self._rank} ends, because {failure}", file=sys.stderr)  # noqa: T201  # the worker's log
            said, since_s = failure, since_s or time.monotonic()
            if time.monotonic() - since_s > (self.grace_s if other else OWN_GRACE_S):
                leave_without_success()
                return

    def _read(self) -> None:
        """Read new entries of the log, and answer them."""
        with self._lock:
            while self._store.check([_key(self._num_read + 1)]):
                self._num_read += 1
                number, failure = self._num_read, Failure(**json.loads(self._store.get(_key(self._num_read))))
                has_broken = bool(failure.what) and not failure.own
                if has_broken and failure.rank != self._rank and self._is_leaving and self.failure is None:
                    self._own_entry = self._append(_LEFT_EARLY, own=True)
                self._store.set(_key(number, self._rank), "")
                if not failure.what:
                    continue
                if not failure.own and self._entry_of_broken is None:
                    self._entry_of_broken = self._num_read
                if self.failure is None or (failure.own and not self.failure.own):
                    self.failure = failure
                    if failure.own:  # this host's launcher would otherwise blame whoever ended first
                        note_failure(f"rank {failure.rank}", failure.what.partition("\n")[0])

    def _append(self, what: str = "", *, own: bool = False) -> int:
        """Write the next entry of the log, a failure or a roll call, and return its number."""
        text = json.dumps(asdict(Failure(rank=self._rank, what=what, own=own)))
        with self._lock:
            self._read()
            number = self._num_read + 1
            while self._store.compare_set(_key(number), "", text) != text.encode():
                number += 1
            self._read()
        return number

    def _say(self, text: str, *, own: bool) -> None:
        with self._lock:
            self._read()
            if self.failure is None or (own and not self.failure.own and self.failure.rank != self._rank):
                self._own_entry = self._append(text[:_LONGEST], own=own)

    def _cause(self, text: str) -> str:
        """Describe why a collective broke."""
        with self._lock:
            self._read()
            entry = self._entry_of_broken
            if entry is None and self.failure is None:
                entry = self._own_entry = self._append(f"lost the others at step {self._step()}: {text}")
        missing = [] if entry is None else self._missing(entry)
        if self.failure is not None and self.failure.own:
            return str(self.failure)
        return _absence(missing) or "all ranks answer, and are at different places"

    def _missing(self, entry: int, patience_s: float = _ANSWER_S) -> list[int]:
        """Return the ranks that have not answered an entry in time."""
        deadline = time.monotonic() + patience_s
        keys = {rank: _key(entry, rank) for rank in range(self._trainers) if rank != self._rank}
        while True:
            is_complete = self._store.check(list(keys.values()))
            self._read()  # a rank writes what the others must know before it answers
            if is_complete:
                return []
            if time.monotonic() > deadline:
                return [rank for rank, key in keys.items() if not self._store.check([key])]
            time.sleep(_POLL_S / 5)

    def _asked(self, ask: Callable[[], Answer], otherwise: Answer, patience_s: float = _ANSWER_S) -> Answer:
        """Return the result of ``ask``, or ``otherwise`` if the store does not respond."""
        answer = [otherwise]

        def run() -> None:
            with suppress(RuntimeError):
                answer[0] = ask()

        thread = threading.Thread(target=run, name="failures-ask", daemon=True)
        thread.start()
        thread.join(patience_s + _STORE_S)
        return answer[0]


def _absence(missing: list[int]) -> str | None:
    if not missing:
        return None
    ranks = f"rank {missing[0]} does" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} do"
    return f"{ranks} not answer: killed or stopped, or the host is gone"


def _key(entry: int, rank: int | None = None) -> str:
    return f"fleetbench/failures/{entry}" + ("" if rank is None else f"/{rank}")
