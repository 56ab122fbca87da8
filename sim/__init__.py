"""The simulator: executes a plan on a simulated clock, in integer nanoseconds.

``run`` is the way in. ``scenario`` gathers what a run needs and refuses what is not simulated (``setting`` is what its plan depends on,
``draws`` its delays, ``limits`` its size); ``execution`` is what an engine saw of it. The rooms:

- ``reference``: the meaning, event by event on SimPy's ``clock``;
- ``arrays``: the same nanoseconds by arrays of ranks;
- ``network``: links, what a collective takes on them alone, and how several share them;
- ``servers``: parameter servers, event by event;
- ``many``: several simulations: over seeds, over values of a key, without what makes a run slow, for the tuner.

Both engines ask ``own_work`` what a rank's operations take, and draw ``spans``.
"""
