"""Links, what collectives take on them, and how several share them.

``links`` are a cluster's ports; ``routes`` says what a collective takes alone, without a clock: by the ``work`` of ``algorithms``, as
``gloo`` or ``nccl`` does it, or as measured. ``sharing`` divides ports among transfers that are under way together.
"""
