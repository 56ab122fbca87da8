"""The vector engine: a run's ranks as arrays, its steps by max-plus recursions.

A time of a rank is the latest of other times plus a duration, so a step of all ranks is a few maxima
and sums over arrays. ``script`` asks the strategy what every step does, once for all ranks, and
``program`` spells it out; ``groups`` are process groups as index arrays, ``stretches`` the ranks'
compute with its delays; ``lanes`` runs programs, many steps at once where trainers begin them
together; ``transfers`` carries collectives that meet nobody, ``shared`` those that share a link;
``engine`` runs a script block by block. ``reach`` says what is no such recursion, and left to the reference.
``execute`` puts it together; ``sights`` keep what was seen, as figures, as a table and
as a timeline.

Nanoseconds are those of the reference engine, for every rank and step.
"""
