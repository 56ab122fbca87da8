"""Why a training run is slow: where a step's time goes. Plain data, without torch.

``observed`` is what the ranks of a job have recorded (``real.why``, in the unchanged script). ``steps``
divides a step into ``shares`` from these records; ``traces`` does so from traces of torch.profiler.
``tuner.why`` names causes, and simulates and tries remedies.
"""
