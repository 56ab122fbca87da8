"""Servers of torchft, set up as its documentation says.

A lighthouse that every replica group knows; in each replica group a store, a manager server and a manager. Every rank is
a replica group of its own. All of it starts with the arm and ends with it, and every address is the loopback's.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

HOST = "127.0.0.1"


class SkippedArm(Exception):  # noqa: N818  # an arm that cannot run here is no error
    """Why an arm cannot run on this machine."""


def _torchft(module: str) -> Any:
    """A module of torchft. Raises ``SkippedArm`` where torchft, or what it needs, is not there."""
    if importlib.util.find_spec("torchft") is None:
        raise SkippedArm("torchft is not installed")
    try:
        return importlib.import_module(f"torchft.{module}")
    except ImportError as error:
        raise SkippedArm(f"torchft does not import: {error}") from error


class Servers:
    """A lighthouse in rank 0's process, and this rank's manager with its store and its process group.

    ``min_replica_size`` and ``max_retries`` leave no averaging uncommitted: one that not all ranks took part in, or
    that failed, raises ``RuntimeError`` in the step that asked for it. All ranks start with the same parameters, so
    ``init_sync`` is off, as torchft advises, and no checkpoint ever travels.
    """

    def __init__(self) -> None:
        num_ranks = dist.get_world_size()
        lighthouse, manager, process_group = _torchft("coordination"), _torchft("manager"), _torchft("process_group")
        self._lighthouse = lighthouse.LighthouseServer(bind=f"{HOST}:0", min_replicas=num_ranks) if dist.get_rank() == 0 else None
        port = torch.tensor([0 if self._lighthouse is None else urlsplit(self._lighthouse.address()).port or 0])
        dist.broadcast(port, src=0)
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._group = process_group.ProcessGroupGloo()
        self.manager = manager.Manager(
            pg=self._group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=num_ranks,
            max_retries=0,
            use_async_quorum=False,  # as in torchft's own test of LocalSGD, which waits for the quorum at once anyway
            init_sync=False,
            rank=0,
            world_size=1,
            store_addr=HOST,
            store_port=self._store.port,
            lighthouse_addr=f"http://{HOST}:{int(port)}",
            hostname=HOST,
            replica_id=f"rank_{dist.get_rank()}",
        )

    def collectives(self) -> int:
        """Collectives so far, from the first averaging on; the group is torchft's own, and torch lists it nowhere."""
        backend = self._group.parent._get_backend(torch.device("cpu"))  # noqa: SLF001  # torch has no public counter
        return int(backend._get_sequence_number_for_group())  # noqa: SLF001

    def shutdown(self) -> None:
        """Stop everything. A rank whose last averaging is done needs no other rank's servers any more."""
        self.manager.shutdown()
        self._group.shutdown()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
