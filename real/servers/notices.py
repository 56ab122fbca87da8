"""Notices: a launcher tells servers that a trainer's process has ended, so that they need not wait until it has been silent for long."""

from __future__ import annotations

import contextlib

import zmq

from fleetbench.errors import WorkerFailed
from real.servers.links import LinkOptions, Links

_PATIENCE_S = 5.0


def tell_lost(endpoints: tuple[str, ...], token: str, rank: int, *, encrypted: bool) -> None:
    """Say that trainer ``rank`` is gone; servers that do not answer find out by themselves."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = Links(context, LinkOptions(rank=rank, endpoints=endpoints, token=token, encrypted=encrypted, startup_timeout_s=_PATIENCE_S))
    try:
        with contextlib.suppress(WorkerFailed):
            links.greet()
            links.tell("lost", rank)
    finally:
        links.close()
        context.term()
