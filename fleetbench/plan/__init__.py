"""The plan: every decision of a strategy, for any executor.

``layers`` is what is known of the model, ``fusion`` makes buckets of its gradients, ``exchange``
lays out the operations that carry them, ``build`` ties them into a ``Plan``. A ``Strategy``
(``synchronous``, ``local_sgd``; ``family`` chooses) turns events into operations. Nothing here
knows torch.distributed or SimPy.
"""
