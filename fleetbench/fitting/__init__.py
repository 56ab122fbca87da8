"""Fits: from measured times to the few numbers that a simulator reads.

Pure functions of arrays, without torch.
"""
