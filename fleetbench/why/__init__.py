"""Why a training is slow: shares of a step, what makes them, and what to do about it; plain data, without torch.

``observed`` is what the ranks of a job have seen (``real.why`` sees it, in the script as it is). ``shares`` divides a step by that, and
``causes`` names what takes more of it than it need. ``tuner.why`` simulates and tries remedies.
"""
