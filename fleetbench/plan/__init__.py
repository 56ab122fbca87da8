"""The plan: every decision of a strategy, for any executor.

``layers`` is what is known of the model, ``fusion`` makes buckets of its gradients, ``exchange``
lays out the operations that carry them, ``build`` ties them into a ``Plan``. ``combination`` is what
a strategy combines, ``training`` turns events into operations by it, and ``drive`` says which events
an executor tells, and when. Nothing here knows torch.distributed or SimPy.
"""
