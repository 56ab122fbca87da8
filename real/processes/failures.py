"""Failures: when one rank of a script fails, all others learn it within seconds, by rank and message.

A rank that waits in a collective learns of nothing before its timeout. So a rank that fails says so in the store at
which all ranks have met, and a daemon thread of every rank looks there.

Life cycle: ``watching`` -> ``ended``, when all ranks leave together; or ``watching`` -> ``failed``, when this rank or
another has failed, or a collective broke. A failed process ends after a grace period, whatever the script does, and
never with exit code 0.

The store has one entry for the first rank that failed by itself (``failed``), and one for the first whose collective
broke (``lost``). Every rank that reads one answers it, so a rank that was killed or stopped, or whose host is gone, is
known by its missing answer. Rank r's answer to ``lost`` is the key ``lost/r``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Literal, TypeVar

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
_Entry = Literal["failed", "lost"]
_ENTRIES: tuple[_Entry, ...] = ("failed", "lost")


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
        self._keeps = store  # on rank 0 it may be the store's server, which must outlive the process group
        self._store = second_connection(store, rank)
        self._rank, self._trainers = rank, trainers
        self._step = step
        self._known: dict[_Entry, Failure] = {}
        self._has_failed = self._has_broken = self._is_leaving = False
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="failures", daemon=True)

    @property
    def failure(self) -> Failure | None:
        """The failure that this rank knows; a rank's own error takes precedence over a broken collective."""
        return self._known.get("failed") or self._known.get("lost")

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
        own = not self._has_broken and (isinstance(error, str) or not is_of_peers(error))
        text = error if isinstance(error, str) else f"failed at step {self._step()}: {type(error).__name__}: {error}"
        self._asked(lambda: self._say("failed" if own else "lost", text), otherwise=None)

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
        is_own = self.failure is not None and self.failure.rank == self._rank
        if is_own and not self._has_broken:
            self._asked(lambda: bool(self._missing("failed")), otherwise=True)
        elif not self._has_broken and ended_by is None:
            time.sleep(self.grace_s)
        if self._has_broken or ended_by is None:
            why = self.failure or "a collective of its own broke"
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
        """Read new entries, and answer them."""
        with self._lock:
            for entry in _ENTRIES:
                if entry in self._known or not self._store.check([_key(entry)]):
                    continue
                self._known[entry] = found = Failure(**json.loads(self._store.get(_key(entry))))
                if entry == "failed":  # this host's launcher would otherwise blame the process that ended first
                    note_failure(f"rank {found.rank}", found.what.partition("\n")[0])
                elif found.rank != self._rank and self._is_leaving:
                    self._say("failed", _LEFT_EARLY)
                self._store.set(_key(entry, self._rank), "")

    def _say(self, entry: _Entry, what: str) -> None:
        """Write an entry, unless some rank has."""
        self._store.compare_set(_key(entry), "", json.dumps(asdict(Failure(rank=self._rank, what=what[:_LONGEST]))))
        self._read()

    def _cause(self, text: str) -> str:
        """Describe why a collective broke."""
        self._read()
        if "failed" not in self._known:
            self._say("lost", f"lost the others at step {self._step()}: {text}")
        missing = [] if "failed" in self._known else self._missing("lost")
        if (failed := self._known.get("failed")) is not None:
            return str(failed)
        ranks = f"rank {missing[0]} does" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))} do"
        return f"{ranks} not answer: killed or stopped, or the host is gone" if missing else "all ranks answer, and are at different places"

    def _missing(self, entry: _Entry) -> list[int]:
        """Return the ranks that have not answered an entry in time."""
        deadline = time.monotonic() + _ANSWER_S
        while True:
            missing = [rank for rank in range(self._trainers) if rank != self._rank and not self._store.check([_key(entry, rank)])]
            self._read()  # a rank writes what the others must know before it answers
            if not missing or time.monotonic() > deadline:
                return missing
            time.sleep(_POLL_S / 5)

    def _asked(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return the result of ``ask``, or ``otherwise`` if the store does not respond."""
        answer = [otherwise]

        def run() -> None:
            with suppress(RuntimeError):
                answer[0] = ask()

        thread = threading.Thread(target=run, name="failures-ask", daemon=True)
        thread.start()
        thread.join(_ANSWER_S + _STORE_S)
        return answer[0]


def _key(entry: _Entry, rank: int | None = None) -> str:
    return f"fleetbench/failures/{entry}" + ("" if rank is None else f"/{rank}")
