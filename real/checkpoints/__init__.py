"""Checkpoints: saving a training, resuming it, and exporting the model for a server."""
