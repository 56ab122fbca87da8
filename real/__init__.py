"""The real executor: executes a plan on processes, with torch.distributed.

``fleet`` is what a user's script imports; ``training`` is a model that trains under a strategy, ``collective`` and ``servers`` are the two
kinds of job that it trains in, ``models`` the engines of a process that trains several. One package a room:

- ``job``: one launch that runs many legs: what the driver does (``session``, ``launch``), and what each rank (``rank_legs``);
- ``attach``: a job for a script that does not know fleetbench;
- ``processes``: how ranks are started, joined, watched and blamed, on one machine or several;
- ``communication``: process groups, lanes beside compute, streams and clocks;
- ``engine``: a plan's operations on a model and an optimizer; the outer step of DiLoCo is in ``buckets``;
- ``compute``: what changes how one trainer computes;
- ``servers``: parameter servers, and the trainers' part of them;
- ``workloads``: the script that trains a registry model;
- ``emulated``: trainers that sleep by a layer table;
- ``profile``: what this machine costs; ``estimate``: what a GPU would, by a roofline;
- ``checkpoints``: what is saved of a training, and how one goes on;
- ``testbed``: a cluster in one box.
"""
