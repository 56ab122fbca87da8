"""Attachment: a job for a script that does not know fleetbench, by an import hook that the command's environment sets.

``real.processes.attached`` says what is set. ``site``: the folder on ``PYTHONPATH``, whose
``sitecustomize`` changes two of torch's modules as they are imported (``following``): ``DistributedDataParallel`` becomes a subclass
(``ddp``), and optimizers are noted (``optimizers``). At the first forward that an optimizer may follow, ``attaching`` calls what a script
with the four lines calls. ``command`` is ``fleetbench launch --strategy FILE -- COMMAND``.
"""
