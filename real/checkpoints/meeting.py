"""Meeting: all trainers agree, on the host, on work besides training, such as a save.

It has its own gloo group, so that a trainer that is doing something else does not appear to agree, and its
gradients are not mistaken for an answer.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fleetbench.errors import ConfigError, EnvironmentLacks
from real.communication.communicators import collective_errors
from real.processes.failures import Failures

_WRITING = timedelta(minutes=30)
"""Timeout while a trainer may write, or evaluate at its script's end."""


class Meeting:
    """A meeting of all trainers. Each creates it at the same point and calls its methods in the same order.

    ``timeout`` limits how long trainers wait for each other, except while one may write.
    """

    def __init__(self, timeout: timedelta, failures: Failures | None = None) -> None:
        self._timeout = timeout
        self._failures = failures
        self._group = dist.new_group(backend="gloo", timeout=_WRITING, group_desc="meeting")
        # A separate group, so that a trainer that leaves does not seem to agree.
        self._exit_group = dist.new_group(backend="gloo", timeout=_WRITING, group_desc="exit")
        self.rank, self.trainers = dist.get_rank(), dist.get_world_size()  # at exit the script may have destroyed the world

    def meet(self, where: str) -> None:
        """Wait until all trainers have called ``where``.

        Raises ``ConfigError`` if some do not; rank 0's names them.
        """
        if self.trainers == 1:
            return
        try:
            dist.monitored_barrier(group=self._group, timeout=self._timeout, wait_all_ranks=True)
        except RuntimeError as error:
            text = str(error).strip().splitlines()[0]
            hint = "every trainer calls it, after the same step: take it out of `if fleet.is_first_worker():`"
            found = ConfigError("not every trainer came", where, text, hint)
            if self._failures is not None:
                self._failures.announce(found)
            raise found from error

    def gather(self, numbers: Sequence[int], *, writes: bool = False) -> list[list[int]]:
        """Return all trainers' integers, equally many from each, in the order of ranks.

        ``writes``: whether a trainer may come late because it writes.
        """
        own = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        if self.trainers == 1:
            return [list(numbers)]
        found = [torch.empty_like(own) for _ in range(self.trainers)]
        self._finish(dist.all_gather(found, own, group=self._group, async_op=True), _WRITING if writes else self._timeout)
        return [tensor.tolist() for tensor in found]

    def _finish(self, work: dist.Work | None, timeout: timedelta) -> None:
        assert work is not None, "every trainer is in the group"
        with collective_errors() if self._failures is None else self._failures.broken():
            work.wait(timeout)

    def leave(self) -> None:
        """Wait at exit for the others to reach theirs; one may still evaluate or save."""
        if self.trainers > 1:
            self._finish(self._exit_group.barrier(), _WRITING)

    def texts(self, text: str) -> list[str]:
        """Return all trainers' texts, in the order of ranks."""
        data = text.encode()
        lengths = [length for (length,) in self.gather([len(data)])]
        padded = self.gather([*data.ljust(max(lengths), b"\0")])
        return [bytes(letters[:length]).decode() for letters, length in zip(padded, lengths, strict=True)]

    def same(self, text: str, what: str, where: str, hint: str) -> None:
        """Raise ``ConfigError`` on all trainers unless all have the same ``text``; ``what`` says how one differs."""
        first, *others_told = self.texts(text)
        others = [rank for rank, told in enumerate(others_told, 1) if told != first]
        if others:
            raise ConfigError(f"rank {others[0]} {what}", where, f"differs from rank 0: {others}", hint)

    @contextmanager
    def together(self, where: str) -> Iterator[None]:
        """Run the body on all trainers; on exit all have done it.

        If one fails, it raises its own error, and the others name it.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as found:  # noqa: BLE001  # raised again after the others know
            error = found
        failed = [rank for rank, (fails,) in enumerate(self.gather([int(error is not None)], writes=True)) if fails]
        if error is not None:
            raise error
        if failed:
            raise EnvironmentLacks(f"rank {failed[0]} could not do its part", where, f"ranks {failed}", "its own error says why")
