"""Workloads: an experiment's own model and data, trained by a program that any launcher starts."""
