"""What the ranks of a command see of their own steps, with torch's DistributedDataParallel left as it is.

``following`` hooks DDP's forward in a process of the job, ``observer`` obeys the driver's looks from the first forward with gradients on,
``events`` notes what the main thread does, ``settings`` makes a DDP anew with other arguments. ``job`` is the driver's side.
"""
