"""Attachment: a job for a script that does not know fleetbench, by an import hook.

The command's environment sets the hook; ``real.processes.attached`` lists the variables. ``site`` is a folder
on ``PYTHONPATH``, whose ``sitecustomize`` changes some of torch's modules when they are imported
(``following``). ``DistributedDataParallel`` becomes a subclass (``ddp``), calls of ``fully_shard`` are
followed (``real.fully_shard``, ``sharded``), and optimizers are recorded (``optimizers``). At the first
forward with gradients of a DDP model that an optimizer holds, ``attaching`` makes the calls of fleet's four
lines for the script, with the model's own ``settings``. ``command`` is ``fleetbench launch --strategy FILE --
COMMAND``.
"""
