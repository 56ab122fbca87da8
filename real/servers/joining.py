"""Joining: how a trainer enters a job. Rank 0 brings the parameters to servers that have none; the others take what servers hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from real.servers.links import Answer, Links
from real.servers.parameters import Parameters, read_values
from real.servers.shard import ROW
from real.servers.spec import Spec

PIECE_BYTES = 8 << 20
"""Of parameters in one message."""


def join(links: Links, spec: Spec, parameters: Parameters) -> tuple[int, ...]:
    """Greet all servers, and leave in ``parameters`` what they hold, of which rank 0 brings what is missing.

    Returns how many updates each server had made by then. Raises ``WorkerFailed`` for a server that does not come or that nobody
    brings the parameters to, ``ConfigError`` for a trainer that servers refuse.
    """
    links.greet()
    servers = range(spec.rules.servers)
    for server in servers:
        links.ask(server, "join", [spec.to_json()])
    blank = {answer.server for answer in links.wait("join") if answer.kind == "blank"}
    for server in blank:
        _bring(links, spec, parameters, server)
    if len(blank) == spec.rules.servers:
        return (0,) * spec.rules.servers
    for server in servers:
        links.ask(server, "fetch")
    fetched = links.wait("fetch")
    for answer in fetched:
        take(answer, spec, parameters)
    return tuple(answer.version for answer in fetched)


def take(answer: Answer, spec: Spec, parameters: Parameters) -> None:
    """Put into ``parameters`` all that one server holds."""
    begin, end = spec.shards.dense_range(answer.server)
    parameters.flat[begin:end] = read_values(answer.tensors[0], parameters.flat)
    for number, (table, body) in enumerate(zip(parameters.tables, answer.tensors[1:], strict=True)):
        num = spec.shards.num_rows(number, answer.server)
        table[answer.server :: spec.rules.servers] = read_values(body, table, num)


def _bring(links: Links, spec: Spec, parameters: Parameters, server: int) -> None:
    """Send the parameters to a server that has none."""
    servers = spec.rules.servers
    begin, end = spec.shards.dense_range(server)
    nothing = [(torch.zeros(0, dtype=torch.int64), table[:0]) for table in parameters.tables]

    def piece(kind: str, dense: torch.Tensor, tables: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        tensors: list[Any] = [b"", dense.numpy()]
        for rows, values in tables:
            tensors += [(rows // servers).numpy().astype(ROW), values.numpy()]
        links.ask(server, kind, tensors)
        while not links.is_idle:
            links.poll(0.1)

    piece("piece", parameters.flat[begin:end].clone(), nothing)
    for number, table in enumerate(parameters.tables):
        for rows in torch.arange(server, len(table), servers).split(max(1, PIECE_BYTES // (table.shape[1] * table.element_size()))):
            piece("piece", parameters.flat[:0], [*nothing[:number], (rows, table.index_select(0, rows)), *nothing[number + 1 :]])
    piece("initial", parameters.flat[:0], nothing)
