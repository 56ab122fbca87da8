"""Virtual trainers: real parameters, data and gradients of all trainers in one process, and no clock.

``virtual_training`` drives the strategy through its steps, ``replicas`` execute the plan's operations on
stacked tensors, ``gradients`` compute all trainers' gradients at once, and a ``trajectory`` is what the
simulator reads of it. Nothing else in ``sim`` imports torch.
"""
