"""The testbed: a cluster in one box. Network namespaces as hosts, shaped links between them, real traffic across.

``topology`` and ``link_shaping`` say what is built, without a system call; ``network`` holds the namespaces and builds it;
``latency_relay`` holds packets for as long as the links' latency. ``testbed`` is a
cluster's testbed, verified by ``traffic`` over its links, and ``noise`` watches the machine in the meantime.
"""
