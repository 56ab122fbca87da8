"""Virtual trainers: real parameters, data and gradients of all trainers in one process, without a clock.

``virtual_training`` drives the strategy through its steps, ``replicas`` execute the plan's operations on
stacked tensors, ``gradients`` computes all trainers' gradients, and ``served`` trains with parameter servers.
The simulator reads the result as a ``Trajectory``. No other package of ``sim`` imports torch.
"""
