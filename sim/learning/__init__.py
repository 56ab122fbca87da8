"""Virtual trainers: real parameters, data and gradients of all trainers in one process, without a clock.

``virtual_training`` drives the strategy through its steps. ``replicas`` execute the plan's operations on
stacked tensors. ``gradients`` compute all trainers' gradients at once. The simulator reads the result as a
``trajectory``. Nothing else in ``sim`` imports torch.
"""
