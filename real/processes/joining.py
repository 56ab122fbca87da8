"""Joining: a process becomes a rank of its job's process group, through the interface that reaches rank 0.

Launchers use the functions about interfaces, too, which do not need torch.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import psutil

from fleetbench.errors import ConfigError, EnvironmentLacks, WorkerFailed
from real.processes.roles import ENVIRONMENT, Role, require_address

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # missing from __all__ only

GLOO = "GLOO_SOCKET_IFNAME"
_RETRY_S = 1.0
_POLL_S = 0.02
_LOOPBACK = ("127.0.0.1", 1)


def join(role: Role, timeout: timedelta, backend: str | None = None, *, takes_interface: bool = True) -> None:
    """Create torch's process group.

    By default it uses NCCL if a launcher started this process and every trainer of the node has its own CUDA
    device, else gloo. If ``CUDA_VISIBLE_DEVICES`` is set, devices are not counted: each rank may see one.
    ``takes_interface``: see ``take_interface``; if false, gloo chooses the interface, as in any other script.

    Raises ``ConfigError`` for a parameter server, and if the address of rank 0 is missing.
    """
    if role.kind == "server":
        hint = 'use DistributedStrategy(mode="ps"), or start trainers alone'
        raise ConfigError("this process is to be a parameter server, and the strategy is collective", "TRAINING_ROLE", "'PSERVER'", hint)
    import torch
    import torch.distributed as dist

    require_address(role, os.environ)
    is_few = torch.cuda.device_count() < (role.trainers_per_node or 1) and "CUDA_VISIBLE_DEVICES" not in os.environ
    has_device = torch.cuda.is_available() and not is_few
    backend = backend or ("nccl" if has_device and role.launcher != "none" else "gloo")
    if role.store is not None:
        file = dist.FileStore(role.store, role.trainers)  # type: ignore[attr-defined]  # missing from __all__ only
        file.set_timeout(timeout)
        dist.init_process_group(backend, store=file, rank=role.rank, world_size=role.trainers, timeout=timeout)
        return
    if takes_interface:
        take_interface(*(_address(role) or _LOOPBACK), patience_s=timeout.total_seconds())
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # missing from __all__ only
    if role.rendezvous is not None:
        ways = dist.rendezvous(role.rendezvous, role.rank, role.trainers, timeout=timeout)  # type: ignore[attr-defined]  # as above
        met, _, _ = next(ways)
        store = own_part(met, role.rank, role.trainers, timeout)
    dist.init_process_group(backend, store=store, rank=role.rank, world_size=role.trainers, timeout=timeout)


def renew_store(timeout: timedelta) -> None:
    """Let the process group that a script has created use this attempt's part of its store; see ``own_part``."""
    import torch.distributed as dist

    world = dist.distributed_c10d._world  # noqa: SLF001  # torch has no public name for the store of a group
    group = dist.distributed_c10d._get_default_group()  # noqa: SLF001  # as above
    backend, store = world.pg_map[group]
    world.pg_map[group] = backend, own_part(store, dist.get_rank(), dist.get_world_size(), timeout)


def own_part(store: Store, rank: int, trainers: int, timeout: timedelta) -> Store:
    """Return the part of ``store`` that belongs to this attempt; all ranks call it at the same place.

    torchrun's store outlives workers that torchrun restarts, and so do the addresses and failures that they have
    written. Its count of restarts cannot name the part, because it may differ between nodes. Raises ``WorkerFailed``
    for a rank that does not join in time.
    """
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or trainers == 1:
        return store
    own = secrets.token_hex(8)
    missing = set(range(1, trainers)) if rank == 0 else {0}
    deadline = time.monotonic() + timeout.total_seconds()
    if rank:
        store.set(f"fleetbench/asks/{rank}", own)  # replaces an earlier attempt's question
    while missing:
        if time.monotonic() > deadline:
            what = f"did not join within {timeout.total_seconds():g} s"
            raise WorkerFailed(what, f"rank {min(missing)}", hint="its output says more")
        if rank:
            if store.check([f"fleetbench/{own}"]):
                own = store.get(f"fleetbench/{own}").decode()
                store.set(f"fleetbench/{own}/{rank}", "")
                missing = set()
        else:
            for other in missing:
                if store.check([f"fleetbench/asks/{other}"]):
                    store.set(f"fleetbench/{store.get(f'fleetbench/asks/{other}').decode()}", own)
            missing = {other for other in missing if not store.check([f"fleetbench/{own}/{other}"])}
        time.sleep(_POLL_S)
    return dist.PrefixStore(own, store)  # type: ignore[attr-defined]  # missing from __all__ only


def _address(role: Role) -> tuple[str, int] | None:
    """Return rank 0's address; ``None`` if trainers meet on one machine or through a file."""
    if role.rendezvous == ENVIRONMENT:
        return None if role.trainers_per_node == role.trainers else (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    address = urlsplit(role.rendezvous or "")
    return (address.hostname or "", address.port or 0) if address.scheme == "tcp" else None


def interface_towards(host: str, port: int, *, patience_s: float = 0.0) -> str | None:
    """Return the interface over which this machine would send to ``host``, without sending anything.

    Returns ``None`` if no interface has the address that it would send from. ``patience_s``: seconds to wait for a
    name that does not resolve yet, such as that of a pod that has not started. Raises ``EnvironmentLacks`` if no
    route to ``host`` is found by then.
    """
    own = own_address(host, port, patience_s)
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address.partition("%")[0] == own for address in addresses):
            return name
    return None


def take_interface(host: str, port: int, *, patience_s: float = 0.0) -> None:
    """Make gloo use, in this process, the interface that reaches rank 0, unless ``GLOO_SOCKET_IFNAME`` is set.

    By itself gloo uses the interface that the host's own name resolves to, which on many systems is the
    loopback. ``patience_s``: see ``interface_towards``. Raises ``EnvironmentLacks`` as that does, and for a
    name that is the loopback only on this host.
    """
    if os.environ.get(GLOO):
        return
    name = interface_towards(host, port, patience_s=patience_s)
    if name == "lo" and not is_loopback(host):
        hint = f"give rank 0's address instead of its name, or set {GLOO}"
        raise EnvironmentLacks("here this name is the loopback, where no other machine comes", "the rendezvous", f"{host}:{port}", hint)
    if name is not None:
        os.environ[GLOO] = name


def own_name_is_loopback() -> bool:
    """Whether this host's name resolves only to its loopback, or not at all.

    gloo then chooses the loopback interface.
    """
    return all(is_loopback(address) for address in _addresses(socket.gethostname()))


def is_loopback(host: str) -> bool:
    """Whether a name or address means the machine itself, on any machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def own_address(host: str, port: int, patience_s: float = 0.0) -> str:
    """Return this machine's address towards ``host``; see ``interface_towards``."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as error:
            if time.monotonic() >= deadline:
                hint = f"check the name, or set {GLOO} yourself"
                raise EnvironmentLacks(f"no way leads there: {error.strerror or error}", "the rendezvous", f"{host}:{port}", hint) from None
            time.sleep(_RETRY_S)


def own_among(hosts: Sequence[str]) -> list[int]:
    """Return the indices of the names and addresses that belong to this machine; unresolved names do not."""
    own = {address.address.partition("%")[0] for addresses in psutil.net_if_addrs().values() for address in addresses}
    return [place for place, host in enumerate(hosts) if any(found in own or is_loopback(found) for found in _addresses(host))]


def _addresses(host: str) -> set[str]:
    try:
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()
