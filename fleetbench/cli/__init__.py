"""The command line: one module per command, and what they share.

A command's module declares its options in ``register`` and does its work in ``run``. Slow imports (numpy,
pandas, torch, rich) happen in ``run``, so that ``--help`` answers at once.
"""
