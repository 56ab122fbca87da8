"""The reference engine: every trainer, collective and transfer is an event on SimPy's clock. Slow and readable: it is the meaning.

``engine`` starts a process for each ``trainer``, which goes through the events of ``fleetbench.plan.drive``: it computes with
``Progress``, which collectives in flight may slow, and executes what its strategy answers. ``collectives`` is where trainers meet:
the last to join starts one, and ``network`` carries it over the links of ``sim.network``, beside others.
"""
