"""The reference engine: every trainer, collective and transfer is an event on SimPy's clock. Slow and readable: it is the meaning.

``engine`` starts a process for each ``trainer``, whose compute makes ``progress`` beside communication; ``collectives`` is where trainers
meet, and ``network`` carries them.
"""
