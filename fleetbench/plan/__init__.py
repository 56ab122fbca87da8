"""The plan: every decision of a strategy, for any executor. Nothing here knows torch.distributed or SimPy.

How a step is decided: ``layers`` is what is known of the model; ``fusion`` makes buckets of its gradients; ``exchange`` lays out the
collectives that carry them over the ``groups``; ``build`` ties these into a ``Plan``. ``combination`` says what a strategy combines,
``steps`` what one step's operations then are, and ``training`` answers each of the ``events`` of a trainer with ``operations``, from its
``state``. ``drive`` is the protocol: which events an executor tells, and when. ``replay`` records them, and decides them again.

Where to find the rows of Fleet's documents:

- fusion of gradients: ``fusion``; MG-WFBP and the best partition: ``mg_wfbp``;
- hierarchical all-reduce, ``nccl_comm_num``, ``sync_nccl_allreduce``, sparse rows, FP16 and BF16 on the wire: ``exchange``; which ranks
  meet: ``groups``;
- gradient merge: ``training`` (which step ends an update, what an epoch's end leaves over) and ``steps`` (``accumulate``, ``release``);
  the sums are made in ``real.engine.buckets``;
- Local SGD: ``local_sgd`` (after which updates trainers average), ``steps`` (what is averaged); adaptive K: ``adaptive_k``;
- an outer optimizer on local steps, fragments and their exchange beside later steps: ``outer``; its step: ``real.engine.buckets``;
- mixed precision: ``loss_scaling``; the update that waits for ``found_inf``: ``training``;
- ``enable_backward_optimizer_op_deps`` (update by bucket), ``enable_sequential_execution``: ``combination``, ``steps``;
- reading results back every n steps, loaders: ``layers`` (``StepHead``);
- parameter servers: ``servers.rules`` (modes, bounds, and which server holds what) and ``servers.training`` (trainer, sender with merging,
  pushing and GeoSGD's rounds, and server). ``real.servers`` carries it out: ``served_training`` the trainer's part, ``sender`` the
  background sender's, ``server`` the server's;
- GeoSGD: ``servers.training`` (when a trainer exchanges), ``real.servers.sender`` (the thread that pushes and pulls),
  ``fleetbench.workloads.server_updates`` (its deltas);
- recompute, op fusion, cuDNN, threads, batch norm over all trainers: nothing is decided. They change the layer table
  (``fleetbench.profile.COMPUTE_ONLY``), and ``real.compute`` carries them out;
- ``auto``: ``fleetbench.recommended``; Fleet's advice: ``fleetbench.advice``; Fleet's own field names: ``fleetbench.fleet_names``.
"""
