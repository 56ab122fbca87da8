"""Recording of steps inside the ranks of a command, with torch's DistributedDataParallel unchanged.

``following`` hooks DDP's forward in a process of the job. ``observer`` carries out the driver's looks from
the first forward with gradients on. ``events`` records the main thread's work. ``settings`` rebuilds a DDP
with other arguments. ``job`` is the driver's side.
"""
