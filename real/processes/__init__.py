"""Processes: the agent that starts a rank, and how a rank that is dead, deaf or orphaned is noticed."""
