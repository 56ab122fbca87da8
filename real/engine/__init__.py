"""The engine: executes a plan's operations on a model and an optimizer."""
