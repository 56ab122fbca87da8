"""A tuning in which nothing runs: the answer for a cluster that one does not have.

``candidates`` are ranked by ten simulated steps each; ``answer`` simulates the best again under other seeds, says how sure
that is (``uncertainty``), and ranks again under other ``assumptions``; ``sizes`` does the first for each size of a cluster.
"""
