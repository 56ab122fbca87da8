"""A clean-up that neither a second Ctrl-C nor a batch system's SIGTERM breaks off."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals that interrupt are not heard inside, which must be bounded in time; another thread hears none anyway."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {which: signal.signal(which, signal.SIG_IGN) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for which, handler in before.items():
            signal.signal(which, signal.SIG_DFL if handler is None else handler)
