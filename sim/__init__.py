"""The simulator: executes a plan on a simulated clock.

``run`` is the way in. ``scenario`` gathers what a run needs and refuses what it cannot execute
(``setting`` is what its plan depends on, ``draws`` its delays); ``engines`` chooses who executes it.
``vector`` has all ranks as arrays. ``reference`` does it event by event, with SimPy: a process per
``trainer``, whose ``computing`` makes ``progress`` beside communication and an ``update_track``, and
whose other time is a ``tally``; ``collectives`` where trainers meet; and a ``network`` that carries them,
``sharing`` the cluster's ``links``; ``spans`` are what the timeline shows of it. Every engine asks
``own_work`` what a rank's operations take, and ``routes`` what a collective takes alone, without a clock:
by the ``work`` of ``algorithms``, as ``gloo`` or ``nccl`` does it, or as ``measured``. Time is integer
nanoseconds on one ``clock``.
"""
