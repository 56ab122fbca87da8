"""The reference engine: every trainer, collective and transfer is an event on SimPy's clock.

It is slow and readable, and defines the meaning of a simulation. ``engine`` starts a process for each
``trainer``, which goes through the events of ``fleetbench.plan.drive``. The trainer computes with
``Progress``, which collectives in flight may slow, and executes the operations that its strategy returns.
Trainers meet in ``network``: the last rank to join a collective starts it. The links of ``sim.network`` carry
it, together with others in flight.
"""
