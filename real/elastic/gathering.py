"""Gathering: the workers that are there for a round, as torchft's manager finds them, and their process group.

torchft's ``Manager`` listens on all interfaces and sends pickles. Its parts, which this module uses instead, can
listen on the one interface that leads to the lighthouse, and tensors travel through the process group alone.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from fleetbench.errors import ConfigError, EnvironmentLacks, WorkerFailed
from real.processes.joining import own_address, take_interface

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""Environment variable with the address of torchft's lighthouse, such as ``http://host:29510``."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""torchrun's environment variable with the number of earlier lives of this worker."""
_HEARTBEAT = timedelta(milliseconds=100)
_CONNECT = timedelta(seconds=5)
"""Time for the members of a new quorum to connect: one of them may have died since it asked for the quorum."""
_HEARTBEAT_TIMEOUT_MS, _JOIN_TIMEOUT_MS, _TICK_MS = 1_000, 60_000, 20
_INSTALL = "python -m pip install 'fleetbench[elastic]'"


class Gathering:
    """This worker's part in the quorums of its job.

    Life cycle: created -> for each round ``find``, ``connect``, collectives, ``complete`` -> ``close``. If one of them
    fails, ``part`` comes before the next ``find``. They raise ``RuntimeError`` or ``OSError`` if a member is gone.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        """``name``: sorts workers, so that ranks follow it; a worker that is started again may take the same.

        ``timeout_s``: seconds to wait for a quorum; a member may be silent for a quarter of it. Raises ``ConfigError``
        without a lighthouse, and ``EnvironmentLacks`` without torchft or if the lighthouse does not answer.
        """
        self._lighthouse = _address(os.environ.get(LIGHTHOUSE, ""))
        torchft = torchft_part("coordination")
        self._timeout_s = timeout_s
        self._silence = timedelta(seconds=timeout_s / 4)
        host, port = urlsplit(self._lighthouse).hostname or "", urlsplit(self._lighthouse).port or 80
        take_interface(host, port)
        own = own_address(host, port)
        self._store, self.store_address = _store(own)
        self.name = f"{name}:{uuid.uuid4()}"
        shown = f"[{own}]" if ":" in own else own
        try:
            self._server = torchft.ManagerServer(
                replica_id=self.name,
                lighthouse_addr=self._lighthouse,
                hostname=shown,
                bind=f"{shown}:0",
                store_addr=self.store_address,
                world_size=1,
                heartbeat_interval=_HEARTBEAT,
                connect_timeout=_CONNECT,
                quorum_retries=0,
            )
            self._client = torchft.ManagerClient(self._server.address(), connect_timeout=_CONNECT)
        except (RuntimeError, TimeoutError) as error:
            raise EnvironmentLacks(f"does not answer: {error}", LIGHTHOUSE, self._lighthouse, "start torchft's lighthouse first") from None
        self._group: Any = torchft_part("process_group").ProcessGroupGloo(timeout=_CONNECT)
        self._configured: int | None = None
        self._failures = 0
        self.quorum: Any = None
        """torchft's last quorum; None before the first."""

    def find(self, step: int) -> Any:
        """Return the next quorum for a worker that has agreed on ``step`` states; wait for the others.

        Raises ``WorkerFailed`` if there is none in time.
        """
        wait = timedelta(seconds=self._timeout_s)
        try:
            self.quorum = self._client._quorum(  # noqa: SLF001  # as torchft's own Manager calls it
                group_rank=0,
                step=step,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=wait,
                init_sync=True,
                commit_failures=self._failures,
            )
        except (RuntimeError, TimeoutError) as error:
            what = f"no quorum of workers was found within {self._timeout_s:g} s: {error}"
            known = "none" if self.quorum is None else ", ".join(each.partition(":")[0] for each in self.quorum.replica_ids)
            hint = f"the last quorum's: {known}; a round, or the lighthouse's end, takes longer than fleet.init(timeout_s=...)"
            raise WorkerFailed(what, f"the workers at {self._lighthouse}", hint=hint) from None
        return self.quorum

    @property
    def is_new(self) -> bool:
        """Whether the quorum's members are not those of the last exchange that this worker completed."""
        return bool(self.quorum.quorum_id != self._configured)

    @property
    def is_source(self) -> bool:
        """Whether the others take the agreed state from this worker: the first of those that have agreed last."""
        return bool(self.quorum.store_address == self.store_address)

    def connect(self) -> None:
        """Make the process group of the quorum's members, if it is a new quorum."""
        if self.is_new:
            found = self.quorum
            host, _, port = found.store_address.rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT.total_seconds()).close()  # torch tries a dead one for 14 s
            place = f"{found.store_address}/fleetbench/{found.quorum_id}"
            self._group.configure(place, self.name, found.replica_rank, found.replica_world_size, found.quorum_id, 0, 1)

    def complete(self) -> None:
        """Note that this worker has completed the exchange of the quorum."""
        self._configured, self._failures = self.quorum.quorum_id, 0

    def part(self) -> None:
        """Leave a broken group, so that the members that still wait in it hear of it; the next one will be new."""
        self._configured = None
        self._failures += 1
        self._group.abort(errored=False)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a tensor of the CPU with its sum over the members, and return it."""
        options = dist.AllreduceOptions()
        options.timeout = self._silence  # the default operator is the sum
        self._group.allreduce([tensor], options).wait()
        return tensor

    def spread(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Replace a tensor of the CPU with that of the member ``source``, and return it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = source, self._silence
        self._group.broadcast([tensor], options).wait()
        return tensor

    def close(self) -> None:
        """Leave: the others go on without this worker after a second without a heartbeat."""
        self._group.abort(errored=False)
        self._server.shutdown()


@contextmanager
def lighthouse(host: str) -> Iterator[str]:
    """Run torchft's lighthouse on an address of this machine, and yield its own. Raises ``EnvironmentLacks`` without torchft.

    It takes a worker without a heartbeat for a second for dead. In a round that somebody has left, it waits at most
    a minute for a worker that lives and does not arrive.
    """
    server = torchft_part("coordination").LighthouseServer(
        bind=f"{host}:0",
        min_replicas=1,
        join_timeout_ms=_JOIN_TIMEOUT_MS,
        quorum_tick_ms=_TICK_MS,
        heartbeat_timeout_ms=_HEARTBEAT_TIMEOUT_MS,
    )
    try:
        yield f"http://{host}:{urlsplit(server.address()).port}"
    finally:
        server.shutdown()


def torchft_part(name: str) -> Any:
    """Import and return a module of torchft. Raises ``EnvironmentLacks`` if it is not installed."""
    import importlib

    os.environ.setdefault("RUST_LOG", "warn")  # its default says several lines a round
    try:
        return importlib.import_module(f"torchft.{name}")
    except ImportError as error:
        raise EnvironmentLacks(f"torchft cannot be imported: {error}", "localsgd_configs.elastic", hint=_INSTALL) from None


def _address(text: str) -> str:
    """Return the lighthouse's address. Raises ``ConfigError`` if ``text`` is none."""
    try:
        is_address = urlsplit(text).scheme == "http" and urlsplit(text).hostname and urlsplit(text).port
    except ValueError:
        is_address = None
    if not is_address:
        hint = f"start with fleetbench launch --restarts N, or set {LIGHTHOUSE}=http://HOST:PORT to a torchft_lighthouse's"
        raise ConfigError("elastic workers find each other through torchft's lighthouse", LIGHTHOUSE, repr(text), hint)
    return text


def _store(host: str) -> tuple[Any, str]:
    """Return a store that listens on ``host`` alone, and its address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]  # missing from __all__ only
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    return store, f"{host}:{port}"
