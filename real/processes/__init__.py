"""Processes: what starts ranks, on one machine or several, which rank each is, and how a dead, deaf or orphaned one is noticed."""
