"""Sharded training: torch's ``fully_shard`` under fleet's strategy."""
