"""Emulated compute: sleeps for the times of a layer table, and communicates for real."""
