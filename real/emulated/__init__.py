"""Emulated compute: sleeps by a layer table, and communicates for real."""
