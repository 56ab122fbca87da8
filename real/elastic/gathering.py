"""Gathering: the workers that are there for a round, as torchft's manager finds them, and their process group.

torchft's class ``Manager`` listens on all interfaces and loads pickles from peers. Its parts, which are used here,
listen on the address that leads to the lighthouse, and state travels as tensors, through the process group.
"""

from __future__ import annotations

import importlib
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
_HEARTBEAT, _CONNECT = timedelta(milliseconds=100), timedelta(seconds=5)
"""Interval of heartbeats; time for members to connect, of whom one may have died since it asked for the quorum."""
_ERRORS = (RuntimeError, TimeoutError)
"""Errors of torchft's servers and clients."""


class Gathering:
    """This worker's part in the quorums of its job.

    Life cycle: created -> ``begin`` -> for each round ``find``, ``connect``, collectives, ``complete`` -> ``close``. If
    one of a round fails, ``part`` comes before the next ``find``. They raise ``RuntimeError`` or ``OSError`` if a member
    is gone.
    """

    def __init__(self, name: str, timeout_s: float) -> None:
        """``name``: its order is that of ranks. ``timeout_s``: limits the wait for a quorum.

        A member may be silent for a quarter of it. Raises ``ConfigError`` without a lighthouse, and
        ``EnvironmentLacks`` without torchft.
        """
        address = os.environ.get(LIGHTHOUSE, "")
        host = urlsplit(address).hostname
        if host is None:
            hint = f"start with fleetbench launch --restarts N, or set {LIGHTHOUSE}=http://HOST:PORT of a torchft_lighthouse"
            raise ConfigError("elastic workers find each other through torchft's lighthouse", LIGHTHOUSE, repr(address), hint)
        torchft_part("coordination")
        self._group: Any = torchft_part("process_group").ProcessGroupGloo(timeout=_CONNECT)
        self._timeout, self._silence = timedelta(seconds=timeout_s), timedelta(seconds=timeout_s / 4)
        self._configured, self._failures = -1, 0
        self.name = f"{name}:{os.environ.get(RESTARTS, '0')}:{uuid.uuid4()}"
        self.quorum: Any = None
        """torchft's last quorum; None before the first."""
        self._lighthouse, self._host, self._port = address, host, urlsplit(address).port or 80
        self._server: Any = None
        take_interface(host, self._port)

    def begin(self) -> None:
        """Let heartbeats begin, from which on the others wait for this worker at the end of a round.

        Raises ``EnvironmentLacks`` if the lighthouse does not answer.
        """
        coordination, own = torchft_part("coordination"), own_address(self._host, self._port)
        with socket.socket(socket.AF_INET6 if ":" in own else socket.AF_INET) as listener:
            listener.bind((own, 0))
            listener.listen(128)
            place = listener.getsockname()[1]
            store: Any = dist.TCPStore  # type: ignore[attr-defined]  # missing from __all__ only
            self._store = store(own, place, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        own = f"[{own}]" if ":" in own else own
        self._store_address = f"{own}:{place}"
        try:
            self._server = coordination.ManagerServer(
                replica_id=self.name,
                lighthouse_addr=self._lighthouse,
                hostname=own,
                bind=f"{own}:0",
                store_addr=self._store_address,
                world_size=1,
                heartbeat_interval=_HEARTBEAT,
                connect_timeout=_CONNECT,
                quorum_retries=0,
            )
            self._client = coordination.ManagerClient(self._server.address(), connect_timeout=_CONNECT)
        except _ERRORS as error:
            hint = "start torchft's lighthouse first"
            raise EnvironmentLacks(f"does not answer: {error}", LIGHTHOUSE, self._lighthouse, hint) from None

    def find(self, step: int) -> Any:
        """Wait for the others, and return the next quorum for a worker that has completed ``step`` exchanges.

        Raises ``WorkerFailed`` if there is none in time.
        """
        try:
            self.quorum = self._client._quorum(  # noqa: SLF001  # as torchft's own Manager calls it
                group_rank=0,
                step=step,
                checkpoint_metadata="",
                shrink_only=False,
                timeout=self._timeout,
                init_sync=True,
                commit_failures=self._failures,
            )
        except _ERRORS as error:
            what = f"did not meet within {self._timeout.total_seconds():g} s: {error}"
            hint = "a round, or a worker that hangs, takes longer than fleet.init(timeout_s=...), or the lighthouse has ended"
            raise WorkerFailed(what, f"workers {self.members}", hint=hint) from None
        return self.quorum

    @property
    def members(self) -> str:
        """Names of the last quorum's members."""
        found = () if self.quorum is None else self.quorum.replica_ids
        return ", ".join(name.partition(":")[0].lstrip("0") or "0" for name in found) or "of the first quorum"

    @property
    def any_in_first_life(self) -> bool:
        """Whether a member of the quorum was not started again after a death."""
        return any(name.split(":")[1] == "0" for name in self.quorum.replica_ids)

    @property
    def has_failed(self) -> bool:
        """Whether an exchange has failed since the last one that this worker has completed."""
        return self._failures > 0

    @property
    def is_new(self) -> bool:
        """Whether the quorum's members are not those of the last exchange that this worker has completed."""
        return bool(self.quorum.quorum_id != self._configured)

    @property
    def is_source(self) -> bool:
        """Whether this worker is the first of those that have agreed last, whose state the others take."""
        return bool(self.quorum.store_address == self._store_address)

    def connect(self) -> None:
        """Make the process group of the quorum's members, if it is a new quorum."""
        if self.is_new:
            found = self.quorum
            host, _, port = found.store_address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), 5.0).close()  # torch tries a dead one for 14 s
            place = f"{found.store_address}/fleetbench/{found.quorum_id}"
            self._group.configure(place, self.name, found.replica_rank, found.replica_world_size, found.quorum_id, 0, 1)

    def complete(self) -> None:
        """Note that this worker has completed the exchange of the quorum."""
        self._configured, self._failures = self.quorum.quorum_id, 0

    def part(self) -> None:
        """Leave a broken group, so that members that still wait in it hear of it; the next quorum has a new one."""
        self._configured = -1
        self._failures += 1
        self._group.abort(errored=False)

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a tensor of the CPU with its sum over the members, and return it."""
        options = dist.AllreduceOptions()
        options.timeout = self._silence
        self._group.allreduce([tensor], options).wait()
        return tensor

    def spread(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Replace a tensor of the CPU with that of the member ``source``, and return it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = source, self._silence
        self._group.broadcast([tensor], options).wait()
        return tensor

    def close(self) -> None:
        """Leave: the lighthouse notices that heartbeats end."""
        self._group.abort(errored=False)
        if self._server is not None:
            self._server.shutdown()


@contextmanager
def lighthouse(host: str) -> Iterator[str]:
    """Run torchft's lighthouse on ``host``, an address of this machine; yield its URL.

    A worker is dead after a second without a heartbeat. For one that lives and does not arrive, the others wait ten
    minutes from the first's arrival, and then continue if they are more than half of those that live. Usually
    ``fleet.init(timeout_s=...)`` ends their wait before. Raises ``EnvironmentLacks`` without torchft.
    """
    limits = {"join_timeout_ms": 600_000, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 1_000}
    server = torchft_part("coordination").LighthouseServer(bind=f"{host}:0", min_replicas=1, **limits)
    try:
        yield f"http://{host}:{urlsplit(server.address()).port}"
    finally:
        server.shutdown()


def torchft_part(name: str) -> Any:
    """Import and return a module of torchft. Raises ``EnvironmentLacks`` if it is not installed."""
    os.environ.setdefault("RUST_LOG", "warn")  # by default, it prints several lines a round
    try:
        return importlib.import_module(f"torchft.{name}")
    except ImportError as error:
        hint = "python -m pip install 'fleetbench[elastic]'"
        raise EnvironmentLacks(f"torchft cannot be imported: {error}", "localsgd_configs.elastic", hint=hint) from None
