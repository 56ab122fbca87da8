"""``train.py`` for ``replay.py``: a process of an asynchronous job that also notes what came when, below OUT.

A trainer's reads.RANK.json: how many updates the server had made when it answered each look-up, of words and of contexts in turn. The
server's order.json: whose push each update was.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import train

from fleetbench import fleet
from fleetbench.workloads.server_updates import Change
from real.servers.links import Answer, Head
from real.servers.parameters import Shard
from real.servers.served_training import ServedTraining


def main(out: str, *others: str) -> None:
    """As train.py."""
    reads: list[int] = []
    order: list[int] = []
    read_by: dict[int, tuple[int, Change]] = {}
    install, read_push, update = ServedTraining._install_rows, Shard.read_push, Shard.update  # noqa: SLF001  # what came when is told nowhere else

    def noted_install(self: ServedTraining, answer: Answer) -> None:
        reads.append(answer.version)
        install(self, answer)

    def noted_push(self: Shard, head: Head, tensors: Sequence[memoryview]) -> Change:
        push = read_push(self, head, tensors)
        read_by[id(push)] = (head.rank, push)
        return push

    def noted_update(self: Shard, pushes: Sequence[Change], divisor: int) -> None:
        order.extend(read_by.pop(id(push))[0] for push in pushes)
        update(self, pushes, divisor)

    ServedTraining._install_rows, Shard.read_push, Shard.update = noted_install, noted_push, noted_update  # type: ignore[method-assign]  # noqa: SLF001  # see above
    train.main(out, *others)
    name, found = ("order.json", order) if fleet.is_server() else (f"reads.{fleet.worker_index()}.json", reads)
    Path(out, name).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
