"""One job: starts and watches the processes that train, ends them, and names the one that failed.

A ``Session`` runs an experiment's own legs, a ``ScriptSession`` those of a user's script. Both start a ``launch``, order legs in its
``folder`` and make ``results`` of what the ranks wrote there. In a script, ``fleet.init`` finds the folder, ``script_steps`` begins and
ends legs where ``optimizer.step()`` returns, ``strategy_switch`` changes strategies between them, and ``watch`` ends the script.
``inside`` is for a driver that is one of the job's processes. ``launcher`` and ``served_launcher`` are ``fleetbench launch``, which
orders no legs.
"""
