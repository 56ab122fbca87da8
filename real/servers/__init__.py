"""Parameter servers as processes: servers, and trainers' connections to them.

A job. ``real.job.served_launcher`` starts a user's script in every role (``real.servers.served`` is what ``fleet`` does there);
``leg_servers`` starts the servers of an experiment's leg.

A push. ``served_training`` hands the gradients of ``optimizer.step()`` to the thread of ``sender``, which sums them, as
``fleetbench.plan.servers`` decides, cuts the sum into the servers' parts (``parameters``) and sends each over ``links``.
``server`` reads it (``wire``, ``parameters``), applies it and acknowledges it. In GeoSGD a push is a delta.

A pull. The sender asks every server, and installs the dense parameters of the answers. Over connections of its own, the trainer's thread
looks up rows of embeddings before a forward, and asks for barriers and checkpoints.

A server. It begins empty or from its file (``checkpoints``), takes model, optimizer and rules from the first trainer that joins
(``Spec``), and serves until all trainers have left. If the connection of one breaks before, the job ends.
"""
