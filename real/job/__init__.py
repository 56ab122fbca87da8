"""One job: starts and watches the processes that train, ends them, and names the one that failed.

A ``Session`` runs legs of an experiment, a ``ScriptSession`` those of a user's script. Both start a
``launch``, order legs in its ``folder`` and make ``results`` of what the ranks wrote there. On a rank,
``Collective`` finds the folder and ``rank_legs`` follows the orders; a leg's steps are ``real.leg_steps``, of
both kinds. ``driver_watch`` ends a script whose driver is gone. ``inside`` is for a driver that is one of the
job's processes. ``launcher`` and ``served_launcher`` are ``fleetbench launch``, which orders no legs.
"""
