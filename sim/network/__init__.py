"""Links, what collectives take on them, and how several share them. No clock but in ``sharing``, which is of servers' messages.

- ``links``: a cluster's ports, their rates and latencies, and the hop from one rank to another;
- ``work``: messages of an algorithm, added up to a latency, a transfer time and traffic on every port;
- ``algorithms``: ring, halving-doubling and trees as such messages; ``gloo`` and ``nccl``: what these libraries do instead;
- ``turns``: how collectives that are in flight together take the ports that they have in common;
- ``routes``: the entrance: the ``Route`` (cost, ports, turns) of a collective among some ranks, by ``cluster.collective``, or as measured;
- ``sharing``: how messages of trainers and servers divide their ports.

A new cost of a message belongs to ``links.Hop`` or ``work``, a new algorithm to ``algorithms``, a new library to a module beside ``gloo``.
"""
