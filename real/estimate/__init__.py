"""Estimated layer tables: a step's operations, counted on tensors without data, and a roofline of the GPU."""
