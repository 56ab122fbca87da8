"""The testbed: a cluster in one box. Network namespaces as hosts, shaped links between them, real traffic across.

``topology`` and ``commands`` say what is built, without a system call. ``keeper`` is the one process
that holds it; all of it is gone when that process is. ``ground`` is the driver's side: it builds,
verifies, and says how a worker enters its host. ``noise`` and ``trial`` watch the machine while
something is measured, and ``calibrate`` finds out how fast a link this machine carries.
"""
