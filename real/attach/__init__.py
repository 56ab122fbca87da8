"""Attachment: a job for a script that does not know fleetbench, by an import hook that the command's environment sets.

``real.processes.attached`` says what is set. ``site`` is the folder on ``PYTHONPATH``, whose ``sitecustomize`` changes some of torch's
modules as they are imported (``following``): ``DistributedDataParallel`` becomes a subclass (``ddp``), calls of ``fully_shard`` are heard
(``real.fully_shard``, ``sharded``), and optimizers are noted (``optimizers``). At a model's first forward whose gradients an optimizer may
use, ``attaching`` calls what a script with the four lines calls, with the model's own ``settings``. ``command`` is ``fleetbench launch
--strategy FILE -- COMMAND``.
"""
