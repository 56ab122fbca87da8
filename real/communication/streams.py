"""Streams: where the host may wait for a device.

A device runs what is enqueued on one stream in order, and what is enqueued on two streams in any
order, unless an event orders them. So the executor says which stream works, and which waits for
which; nothing of that blocks the host. The seam is torch's own: ``Stream``, ``current_stream`` and
``stream`` of ``torch.get_device_module(device)``. On a CPU, where the host itself works and there is
nothing to order, ``torch.cpu`` has them; the tests bring a third implementation, which finds what was
left unordered.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_MAY_WAIT: ContextVar[bool] = ContextVar("fleetbench_host_may_wait", default=False)


@contextmanager
def host_reads() -> Iterator[None]:
    """Marks a place where the host may read a device value, and so wait for the device.

    There are few: a scalar that a strategy observes (found_inf after the last bucket, a loss at a
    synchronisation), and the losses that are read every so many steps. The mark does nothing by
    itself; the tests' streams refuse every other read inside a step.
    """
    token = _MAY_WAIT.set(True)
    try:
        yield
    finally:
        _MAY_WAIT.reset(token)


def host_may_wait() -> bool:
    """Whether the caller runs inside ``host_reads``."""
    return _MAY_WAIT.get()
