"""Network: links, the time that collectives take on them, and how several collectives share them.

- ``links``: a cluster's ports, their rates and latencies, and the hop from one rank to another;
- ``work``: the sum of an algorithm's messages: a latency, a transfer time and traffic on every port;
- ``algorithms``: the messages of rings and of a binomial tree; ``gloo`` and ``nccl``: models of what
  these libraries do instead;
- ``measured``: collectives whose times were measured;
- ``turns``: how collectives that are in flight together take the ports that they have in common;
- ``routes``: the entry point: the ``Route`` (cost, ports, turns) of a collective among some ranks, for any
  ``cluster.collective``;
- ``sharing``: how messages between trainers and parameter servers divide their ports; the only module with a
  clock.

A new cost of a message belongs in ``links.Hop`` or ``work``, a new algorithm in ``algorithms``, and a new
library in a module next to ``gloo``.
"""
