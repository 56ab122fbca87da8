"""The array engine (``--engine vector``): a run's ranks as arrays, its steps by max-plus recursions.

A time of a rank is the latest of other times plus a duration, so a step of all ranks is a few maxima
and sums over arrays. How a simulation flows:

- ``program`` asks the strategy what every step does, once for all ranks, and spells each kind of step out as instructions;
- ``engine`` takes the steps block by block, many at once where trainers begin them together, and puts the result together;
- ``interpreter`` takes ranks through a program: ``compute`` is their compute with its delays, ``transfers`` carries collectives that meet
  no other on a port, ``shared_links`` those that do, by an ``event_loop``;
- ``observers`` keep what is seen of steps: ends, sums, the table, the timeline.

``layout`` has process groups as arrays of ranks. ``supported`` says which scenarios are left to the reference engine. Nanoseconds are those
of the reference engine, for every rank and step.
"""
