"""The simulator: executes a plan on a simulated clock, in integer nanoseconds.

How a simulation flows: ``run.simulate`` resolves the experiment into a ``scenario`` (layer table, plan, strategy, links, delays) or refuses
it; an engine takes all trainers to their last step and returns an ``execution``; ``run`` makes of it the result that every executor gives.

- ``arrays``: the engine for most runs, by arrays of ranks;
- ``reference``: the slow and readable engine, event by event on SimPy's ``clock``, equal in every nanosecond: it is the meaning;
- ``network``: links, what a collective takes on them alone, and how several share them;
- ``servers``: parameter servers, event by event;
- ``many``: several simulations: over seeds, over values of a key, without what slows a run, for the tuner.

Both engines ask ``own_work`` what a rank's operations take, draw delays from the scenario's ``Draws``, and keep spans for the timeline.
``limits`` says how large a run may be.
"""
