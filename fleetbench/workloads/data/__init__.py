"""Data: prepared once, read by every rank."""
