"""Attachment: a job for a script that does not know fleetbench, by an import hook.

The command's environment sets the hook; ``real.processes.attached`` lists the variables. ``site`` is a folder
on ``PYTHONPATH``, whose ``sitecustomize`` changes some of torch's modules when they are imported
(``following``). ``DistributedDataParallel`` becomes a subclass (``ddp``), calls of ``fully_shard`` are
followed (``real.fully_shard``, ``sharded``), and optimizers are recorded (``optimizers``). At a model's first
forward with gradients that an optimizer may use, ``attaching`` makes the calls of a script with the four
lines, with the model's own ``settings``. ``command`` is ``fleetbench launch --strategy FILE -- COMMAND``.
"""
