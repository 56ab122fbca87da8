"""Nodes: a launch on several machines, and what its launchers tell each other.

Node 0 listens at the rendezvous' address; its store serves the trainers, and the ``Board``, on which every launcher says that it is
there, and how it ended. So a node that fails ends the others at once instead of at their next collective's timeout, and every node
names the same rank.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # missing from __all__ only

_LOOK_S = 0.5
_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Where this machine stands among those of a launch."""

    num: int
    rank: int
    host: str
    """Name or address of node 0, as every node sees it."""
    port: int
    startup_timeout_s: float = 300.0
    """Until all launchers have met."""


Why = Literal["done", "failed", "told", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one node's launcher ended."""

    why: Why
    """done; a worker of its own failed; another node's end was its own; somebody on this node ended it."""
    codes: dict[int, int] = field(default_factory=dict)
    """Exit code of its own ranks that failed first; negative is a signal."""
    stopped: list[int] = field(default_factory=list)
    """Its own ranks that did not run when it was told to end."""
    order: int = 0
    """Which of the nodes said it first, counted from 1."""


class Board:
    """What the launchers of a job write for each other. States: open, met, watched, ended.

    The constructor waits until node 0 listens, and ``meet`` until all nodes are there; both raise torch's ``DistError`` if that does
    not come within the start-up timeout.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.lost = False
        """Whether node 0's store stopped answering."""
        self.told = threading.Event()
        """Set when another node has failed, or node 0 is gone."""
        self._server = self._connect(is_master=True) if nodes.rank == 0 else None  # the trainers meet there, too
        self._store = self._connect(is_master=False)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def _connect(self, *, is_master: bool) -> Store:
        import torch.distributed as dist

        nodes = self._nodes
        timeout = timedelta(seconds=nodes.startup_timeout_s)
        return dist.TCPStore(nodes.host, nodes.port, is_master=is_master, timeout=timeout, wait_for_workers=False)  # type: ignore[attr-defined]  # missing from __all__ only

    def meet(self, num: int) -> list[int]:
        """Wait for all nodes; how many workers each has, ``num`` of them this one."""
        self._store.set(_key("here", self._nodes.rank), str(num))
        return [int(self._store.get(_key("here", node))) for node in range(self._nodes.num)]

    def watch(self) -> None:
        """Set ``told``, from another thread, as soon as there is a reason."""
        self._thread = threading.Thread(target=self._watch, name="board", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                failed = self._store.check([_key("failed")])
            except RuntimeError:  # node 0 is gone
                failed = self.lost = True
            if failed:
                self.told.set()
                return

    def end(self, why: Why, codes: Mapping[int, int], stopped: Collection[int]) -> None:
        """Say how this node has ended; what it did not do for another's sake ends the others, too."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        try:
            end = End(why=why, codes=dict(codes), stopped=sorted(stopped), order=self._store.add(_key("order"), 1))
            self._store.set(_key("end", self._nodes.rank), json.dumps(asdict(end)))
            if why in ("failed", "interrupted"):
                self._store.set(_key("failed"), "1")
        except RuntimeError:
            self.lost = True

    def ends(self, patience_s: float) -> dict[int, End]:
        """How nodes ended, once all have said it, or at the end of all patience. Node 0 stays until the others know.

        A node without an end is gone. Where node 0 is gone, the others cannot be asked, and are taken for told.
        """
        ends = {} if self.lost else self._ends(patience_s)
        if self.lost:
            return {node: End(why="told") for node in range(1, self._nodes.num)}
        try:
            self._store.add(_key("read"), 1)
            deadline = time.monotonic() + 2.0
            while self._nodes.rank == 0 and self._store.add(_key("read"), 0) < len(ends) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        except RuntimeError:
            self.lost = True
        return ends

    def _ends(self, patience_s: float) -> dict[int, End]:
        ends: dict[int, End] = {}
        deadline = time.monotonic() + patience_s
        try:
            while len(ends) < self._nodes.num and time.monotonic() < deadline:
                for node in range(self._nodes.num):
                    if node not in ends and self._store.check([_key("end", node)]):
                        ends[node] = _decode(json.loads(self._store.get(_key("end", node))))
                time.sleep(_POLL_S)
        except RuntimeError:
            self.lost = True
        return ends


def _decode(data: dict[str, Any]) -> End:
    return End(**data | {"codes": {int(rank): code for rank, code in data["codes"].items()}})


def _key(*parts: object) -> str:
    return "/".join(["fleetbench", *map(str, parts)])
