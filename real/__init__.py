"""The real executor: executes a plan on processes, with torch.distributed.

A user's script imports ``fleet``. ``training`` is a model that trains under a strategy. ``collective`` and
``servers`` are the two kinds of job, and ``models`` has the engines of a process that trains several models.
The packages:

- ``job``: one launch that runs many legs: the driver's side (``session``, ``launch``), and each rank's
  (``rank_legs``)
- ``attach``: a job for a script that does not know fleetbench; ``why``: recording of such a script's steps
- ``processes``: how ranks are started, joined and watched, and how a failed one is found, on one machine or several
- ``communication``: process groups, lanes on which exchanges overlap compute, streams and clocks
- ``engine``: a plan's operations on a model and an optimizer; the outer step of DiLoCo is in ``buckets``
- ``sharding``: the engine of a sharded model
- ``compute``: changes to one trainer's compute
- ``servers``: parameter servers, and the trainers' part of them
- ``workloads``: the script that trains a registry model
- ``emulated``: trainers that sleep by a layer table
- ``profile``: measured costs on this machine; ``estimate``: a GPU's costs, by a roofline
- ``checkpoints``: saving a training, and resuming it
- ``testbed``: a cluster on one machine
"""
