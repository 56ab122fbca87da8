"""Checkpoints: saving a training, continuing it, and exporting the model for serving."""
