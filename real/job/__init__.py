"""One job: starts and watches the processes that train, ends them, and names the one that failed.

A ``Session`` runs legs of an experiment, a ``ScriptSession`` those of a user's script. Both start a
``launch``, order legs in its ``folder`` and make ``results`` from the files that ranks write there. On a
rank, ``Collective`` finds the folder and ``rank_legs`` follows the orders; ``real.leg_steps`` runs the steps
of both kinds of legs. ``driver_watch`` ends a script whose driver is gone. ``inside`` is for a driver that is
one of the job's processes. ``launcher`` and ``served_launcher`` implement ``fleetbench launch``, which has no
legs.
"""
