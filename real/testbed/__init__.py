"""The testbed: a cluster in one box. Network namespaces as hosts, shaped links between them, real traffic across.

``topology`` and ``commands`` say what is built, without a system call; ``network`` holds the namespaces and builds it. ``ground``
is a cluster's testbed, ``traffic`` and ``verify`` measure its links, ``noise`` watches the machine in the meantime, and ``stage`` puts a
session's workers on it.
"""
