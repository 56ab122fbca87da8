"""The simulator: executes a plan on a simulated clock.

``run`` is the way in. ``scenario`` gathers what a run needs and refuses what it cannot execute;
``reference`` is the engine that does it event by event, with SimPy: a process per ``trainer``,
``collectives`` where trainers meet, and a ``network`` that they share. Time is integer
nanoseconds on one ``clock``.
"""
