"""The plan: every decision of a strategy, for any executor. Nothing here knows torch.distributed or SimPy.

How a step is decided: ``layers`` describes the model; ``fusion`` forms buckets of its gradients; ``exchange``
lays out the collectives that carry them over the ``groups``; ``build`` combines these into a ``Plan``.
``combination`` holds the settings that a strategy combines, ``steps`` gives the operations of one step, and
``training`` answers each of a trainer's ``events`` with ``operations``, from its ``state``. ``drive`` is the
protocol: which events an executor reports, and when. ``replay`` records events and repeats the decisions.

Modules that implement each feature of Fleet's documents:

- fusion of gradients: ``fusion``; MG-WFBP and the best partition: ``mg_wfbp``;
- hierarchical all-reduce, ``nccl_comm_num``, ``sync_nccl_allreduce``, sparse rows, FP16 and BF16 on the wire:
  ``exchange``; which ranks form a group: ``groups``;
- gradient merge: ``training`` (which step ends an update, what happens to the remainder of an epoch) and
  ``steps`` (``accumulate``, ``release``); ``real.engine.buckets`` computes the sums;
- Local SGD: ``local_sgd`` (after which updates trainers average), ``steps`` (what is averaged); adaptive K:
  ``adaptive_k``;
- an outer optimizer on local steps, fragments and their overlapped exchange: ``outer``; its step:
  ``real.engine.buckets``;
- mixed precision: ``loss_scaling``; the update that waits for ``found_inf``: ``training``;
- ``enable_backward_optimizer_op_deps`` (update by bucket), ``enable_sequential_execution``: ``combination``,
  ``steps``;
- reading results back every n steps, loaders: ``layers`` (``StepHead``);
- parameter servers: ``servers.rules`` (modes, bounds, and which server holds what) and ``servers.training``
  (trainer, sender with merging, pushing and GeoSGD's rounds, and server). ``real.servers`` executes it:
  ``served_training`` for the trainer, ``sender`` for the background sender, ``server`` for the server;
- GeoSGD: ``servers.training`` (when a trainer exchanges), ``real.servers.sender`` (the thread that pushes and
  pulls), ``fleetbench.workloads.server_updates`` (its deltas);
- recompute, op fusion, cuDNN, threads, synchronised batch norm: they need no decision. They change the
  layer table (``fleetbench.profile.COMPUTE_ONLY``), and ``real.compute`` executes them;
- ``auto``: ``fleetbench.recommended``; Fleet's advice: ``fleetbench.advice``; Fleet's field names:
  ``fleetbench.fleet_names``.
"""
