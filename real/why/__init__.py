"""What the ranks of a command do in their own steps, observed with DistributedDataParallel unchanged.

``following`` hooks DDP's forward in a process of the job. From the first forward with gradients, ``observer``
executes the driver's looks. ``events`` records what the main thread does. ``settings`` rebuilds a DDP with
other arguments. ``job`` is the driver's side.
"""
