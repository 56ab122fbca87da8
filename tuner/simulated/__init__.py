"""Tuning by simulation alone: the answer for a cluster that is not available.

``candidates`` ranks strategies by ten simulated steps each. ``answer`` simulates the best again with other
seeds, gives an interval (``uncertainty``), and ranks again under other ``assumptions``. ``sizes`` finds the
best strategy for each size of a cluster.
"""
