"""Joining: how a trainer enters a job. Rank 0 brings the parameters to servers that have none; the others take what servers hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from fleetbench.errors import ConfigError
from real.servers.links import BEAT_S, Answer, Links
from real.servers.parameters import Change, Parameters, read_values, shard_change
from real.servers.spec import Spec

PIECE_BYTES = 8 << 20
"""Of parameters in one message."""


def join(links: Links, spec: Spec, parameters: Parameters) -> tuple[int, ...]:
    """Greet all servers, and leave in ``parameters`` what they hold, of which rank 0 brings what is missing.

    Returns how many updates each server had made by then. Raises ``WorkerFailed`` for a server that does not come or that nobody
    brings the parameters to, ``ConfigError`` for a trainer that servers refuse, and, on rank 0, for servers of which only some have
    a checkpoint.
    """
    links.greet()
    servers = range(spec.rules.servers)
    for server in servers:
        links.ask(server, "join", [spec.to_json()])
    joined = links.wait("join", links.options.startup_timeout_s)
    blank = {answer.server for answer in joined if answer.kind == "blank"}
    _refuse_mixture(links, joined, blank)
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


def meet(links: Links, at_least: int) -> None:
    """Come to where the others are: to the first ``at_least`` meetings of all trainers, and to every one that some server has seen.

    A trainer that takes the place of another finds these after it, and waits for nobody; but where the one before it came to a
    meeting on some servers alone, the others there still wait for it.
    """
    reached = max(at_least, *links.meetings)
    while any(num < reached for num in links.meetings):
        for server, num in enumerate(links.meetings):
            if num < reached:
                links.ask(server, "barrier")
        while not links.is_idle:
            links.poll(BEAT_S)


def take(answer: Answer, spec: Spec, parameters: Parameters) -> None:
    """Put into ``parameters`` all that one server holds."""
    begin, end = spec.shards.dense_range(answer.server)
    parameters.flat[begin:end] = read_values(answer.tensors[0], parameters.flat)
    for number, (table, body) in enumerate(zip(parameters.tables, answer.tensors[1:], strict=True)):
        num = spec.shards.num_rows(number, answer.server)
        table[answer.server :: spec.rules.servers] = read_values(body, table, num)


def in_pieces(rows: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of a table, so many at a time that their values fit in a message."""
    return rows.split(max(1, PIECE_BYTES // (table.shape[1] * table.element_size())))  # type: ignore[no-any-return]  # split is untyped


def _refuse_mixture(links: Links, joined: Sequence[Answer], blank: Collection[int]) -> None:
    """Parameters of the beginning on some servers, and trained ones on others, are no model."""
    trained = next((answer for answer in joined if answer.server not in blank and answer.version), None)
    if blank and trained is not None:
        what = f"has no checkpoint to begin from, where server {trained.server} goes on after {trained.version} updates"
        hint = "every server needs its shard of the same checkpoint in its fleet.init_server(FOLDER), or none of them has one"
        raise ConfigError(what, f"server {min(blank)}", links.options.endpoints[min(blank)], hint)


def _bring(links: Links, spec: Spec, parameters: Parameters, server: int) -> None:
    """Send the parameters to a server that has none."""
    nothing = [(torch.zeros(0, dtype=torch.int64), table[:0]) for table in parameters.tables]

    def send(kind: str, change: Change) -> None:
        links.ask(server, kind, shard_change(change, spec.shards, server))
        while not links.is_idle:
            links.poll(0.1)

    send("piece", Change(parameters.flat, nothing))
    for number, table in enumerate(parameters.tables):
        for rows in in_pieces(torch.arange(server, len(table), spec.rules.servers), table):
            send("piece", Change(None, [*nothing[:number], (rows, table.index_select(0, rows)), *nothing[number + 1 :]]))
    send("initial", Change(None, nothing))
