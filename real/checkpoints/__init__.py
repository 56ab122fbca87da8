"""Checkpoints: what is saved of a training, how a training goes on from it, and the model for a server."""
