"""The simulator: executes a plan on a simulated clock, in integer nanoseconds.

``run.simulate`` resolves the experiment into a ``scenario`` (layer table, plan, strategy, links, delays) or
refuses it. An engine takes all trainers to their last step and returns an ``execution``. ``run`` turns it
into the result that every executor returns.

- ``arrays``: the engine for most runs, which computes on arrays of ranks
- ``reference``: the slow and readable engine, event by event on SimPy's ``clock``. It defines the meaning of a
  simulation, and ``arrays`` agrees with it in every nanosecond
- ``network``: links, the duration of a collective by itself, and how several collectives share links
- ``servers``: parameter servers, event by event
- ``many``: sets of simulations: over seeds, over values of a key, without each cause of slowness, and
  for the tuner

Both engines ask ``own_work`` how long a rank's operations take, draw delays from the scenario's ``Draws``,
and keep spans for the timeline. ``limits`` says how large a run may be.
"""
