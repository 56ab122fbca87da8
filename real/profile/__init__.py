"""Profiles: short runs of an experiment's own trainers, and the figures read from them."""
