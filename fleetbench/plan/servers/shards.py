"""Shards: which server holds what. Dense parameters by balanced ranges, embeddings by row number."""

from __future__ import annotations

from dataclasses import dataclass

from fleetbench.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Config):
    """An embedding: ``rows`` vectors of ``width`` numbers."""

    name: str
    rows: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """All parameters of a model over ``servers``. Dense ones count as one vector, in the model's order."""

    servers: int
    dense: int
    """Numbers in that vector."""
    tables: tuple[Table, ...] = ()

    def dense_range(self, server: int) -> tuple[int, int]:
        """Begin and end of a server's part of the dense vector; parts differ by at most one number."""
        return server * self.dense // self.servers, (server + 1) * self.dense // self.servers

    def num_rows(self, table: int, server: int) -> int:
        """Rows of a table on a server: row r is row r // servers of server r % servers."""
        return (self.tables[table].rows - server + self.servers - 1) // self.servers
