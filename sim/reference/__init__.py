"""The reference engine: every trainer, collective and transfer is an event on SimPy's clock. Slow and readable: it is the meaning.

``engine`` starts a process for each ``trainer``, which goes through the events of ``fleetbench.plan.drive``: it computes with
``Progress``, which collectives in flight may slow, and executes what its strategy answers. ``network`` is where trainers
meet: the last to join a collective starts it, and it is carried over the links of ``sim.network``, beside others.
"""
