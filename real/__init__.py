"""The real executor: executes a plan on processes, with torch.distributed.

``fleet`` is what a user's script imports; ``session`` is one launch that runs many ``leg``s, through
``launch`` and one ``worker`` a rank, on which ``training`` runs them. Below them, one package a room:

- ``communication``: process groups, lanes beside compute, streams and clocks;
- ``engine``: a plan's operations on a model and an optimizer;
- ``compute``: what changes how one trainer computes;
- ``models`` and ``data``;
- ``emulated``: trainers that sleep by a layer table;
- ``profile`` and ``collectives``: what this machine costs;
- ``processes``: how ranks are started, joined, watched and blamed, on one machine or several;
- ``script``: legs in the user's own script;
- ``checkpoints``: what is saved of a training, and how one goes on;
- ``evaluation``: a stored model over a whole data set;
- ``testbed``: a cluster in one box.
"""
