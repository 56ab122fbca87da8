"""The testbed: a cluster on one machine, with network namespaces as hosts and shaped links between them.

``topology`` and ``link_shaping`` describe what is built, without a system call. ``network`` holds the
namespaces and builds it. ``latency_relay`` delays packets by the links' latency. ``testbed`` is a cluster's
testbed, which ``traffic`` over its links verifies. ``noise`` watches the machine during a measurement.
"""
