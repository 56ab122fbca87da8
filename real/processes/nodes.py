"""Nodes: a launch on several machines, and what its agents tell each other.

Node 0 listens at the rendezvous' address; its store serves torch's agents, the trainers, and the
``Board``, on which every agent says how it ended. So a node that fails ends the
others at once instead of at their next collective's timeout, and every node names the same rank.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
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
    """Until all agents have met."""


Why = Literal["done", "failed", "told", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one node's agent ended."""

    why: Why
    """done; a worker of its own failed; another node's end was its own; somebody on this node ended it."""
    codes: dict[int, int] = field(default_factory=dict)
    """Exit code of its own ranks that failed first; negative is a signal."""
    stopped: list[int] = field(default_factory=list)
    """Its own ranks that did not run when it was told to end."""
    order: int = 0
    """Which of the nodes said it first, counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a launch, the same on every node that can still ask."""

    codes: dict[int, int] = field(default_factory=dict)
    stopped: list[int] = field(default_factory=list)
    node_of: dict[int, int] = field(default_factory=dict)
    """Node of every rank above."""
    gone: list[int] = field(default_factory=list)
    """Nodes whose agents said nothing to the end: killed, or their machines are."""
    interrupted: list[int] = field(default_factory=list)
    """Nodes whose launch somebody ended, with Ctrl-C say."""
    apart: str | None = None
    """Why the nodes never met."""

    def to_json(self) -> str:
        """JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Read what ``to_json`` wrote; JSON knows no integer keys."""
        data = json.loads(text)
        return cls(**data | {name: {int(key): value for key, value in data[name].items()} for name in ("codes", "node_of")})


def verdict_of(ends: Mapping[int, End], num: int) -> Verdict:
    """Who is to blame, from how ``num`` nodes ended; a node without an end is gone.

    Codes are those of whatever was killed on any node and of the node that spoke first, for when a
    rank fails, ranks elsewhere fail in their collectives a moment later.
    """
    failed = {node: end for node, end in ends.items() if end.why == "failed"}
    first = min(failed, key=lambda node: failed[node].order) if failed else None
    codes = {
        rank: code
        for node, end in failed.items()
        for rank, code in end.codes.items()
        if node == first or (code < 0 and code != -signal.SIGTERM)
    }
    stopped = sorted(rank for end in ends.values() for rank in end.stopped)
    owner = {rank: node for node, end in ends.items() for rank in (*end.codes, *end.stopped)}
    return Verdict(
        codes=codes,
        stopped=stopped,
        node_of={rank: owner[rank] for rank in (*codes, *stopped)},
        gone=[node for node in range(num) if node not in ends],
        interrupted=sorted(node for node, end in ends.items() if end.why == "interrupted"),
    )


class Board:
    """What the agents of a launch write for each other. States: open, watched, ended.

    The constructor waits until node 0 listens, and raises torch's ``DistError`` if it does not within
    the start-up timeout.
    """

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self.lost = False
        """Whether node 0's store stopped answering."""
        self._server = self._connect(is_master=nodes.rank == 0)  # torch's agent and the trainers share it
        self._store = self._connect(is_master=False)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def _connect(self, *, is_master: bool) -> Store:
        import torch.distributed as dist

        nodes = self._nodes
        return dist.TCPStore(  # type: ignore[attr-defined]  # missing from __all__ only
            nodes.host,
            nodes.port,
            is_master=is_master,
            timeout=timedelta(seconds=nodes.startup_timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )

    def watch(self, on_failure: Callable[[], None]) -> None:
        """Call ``on_failure``, once and on another thread, when another node fails or node 0 is gone."""
        self._thread = threading.Thread(target=self._watch, args=(on_failure,), name="board", daemon=True)
        self._thread.start()

    def _watch(self, on_failure: Callable[[], None]) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                failed = self._store.check([_key("failed")])
            except RuntimeError:  # node 0 is gone
                failed = self.lost = True
            if failed and not self._ended.is_set():
                on_failure()
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

    def verdict(self, patience_s: float) -> Verdict:
        """How all nodes ended, once they have said it, or at the end of all patience. Node 0 stays until the others know."""
        ends = {} if self.lost else self._ends(patience_s)
        known = verdict_of(ends, self._nodes.num)
        if self.lost:  # the others cannot be asked
            return Verdict(gone=[0])
        try:
            self._store.add(_key("read"), 1)
            deadline = time.monotonic() + 2.0
            while self._nodes.rank == 0 and self._store.add(_key("read"), 0) < len(ends) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        except RuntimeError:
            self.lost = True
        return known

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
