"""The command line: one module a command, and the few bits that they share.

A command's module declares its options in ``register`` and does its work in ``run``; what is slow
to import (numpy, pandas, torch, rich) is imported by ``run``, so that ``--help`` answers at once.
"""
