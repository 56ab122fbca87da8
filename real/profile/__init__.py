"""Profiles: short runs of an experiment's own trainers, and what is read off them."""
