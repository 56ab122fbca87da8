"""Records of a command's ranks about their own steps, with torch's DistributedDataParallel unchanged.

``following`` hooks DDP's forward in a process of the job. ``observer`` obeys the driver's looks from the
first forward with gradients on. ``events`` records what the main thread does. ``settings`` rebuilds a DDP
with other arguments. ``job`` is the driver's side.
"""
