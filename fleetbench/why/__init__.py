"""Why a training is slow: where a step's time goes; plain data, without torch.

``observed`` is what the ranks of a job have seen (``real.why``, in the script as it is); ``steps`` divides a step by it into ``shares``.
``traces`` does so by traces of torch.profiler. ``tuner.why`` names causes, and simulates and tries remedies.
"""
