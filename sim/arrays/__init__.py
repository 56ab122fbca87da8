"""The array engine (``--engine vector``): a run's ranks as arrays, its steps as max-plus recursions.

Each time of a rank is the maximum of other times plus a duration, so a step of all ranks takes a few maxima
and sums over arrays. A simulation goes through these modules:

- ``program`` asks the strategy what each step does, once for all ranks, and writes each kind of step as a
  list of instructions.
- ``engine`` runs the steps in blocks, many of them side by side if ranks begin them together, and builds the
  result.
- ``interpreter`` takes ranks through a program. ``compute`` gives compute times with delays. ``transfers``
  carries collectives that share no port with others in flight; ``shared_links`` carries the rest by an
  ``event_loop``.
- ``observers`` keep data of each step: sums, the table, the timeline.

``layout`` has process groups as arrays of ranks. ``supported`` decides which scenarios are left to the
reference engine. For every rank and step, times equal those of the reference engine in every nanosecond.
"""
