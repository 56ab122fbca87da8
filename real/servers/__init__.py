"""Parameter servers as processes: servers, and trainers' connections to them.

A job. ``real.job.served_launcher`` starts a user's script in every role (``real.servers.served`` is what ``fleet`` does there);
``leg_servers`` starts the servers of an experiment's leg. A launcher and its host's servers tell each other on the ``board`` which
processes ended, and it tells the servers of other hosts.

A push. ``served_training`` hands the gradients of ``optimizer.step()`` to the thread of ``sender``, which sums them, as
``fleetbench.plan.servers`` decides, cuts the sum into the servers' parts (``parameters``) and sends each over ``links``, numbered.
``server`` reads it (``wire``, ``parameters``), applies it once, and acknowledges it. Until then it is sent again over each new connection.
In GeoSGD a push is a delta (``geo_sgd``).

A pull. The sender asks every server, and installs the dense parameters of the answers; rows of embeddings are looked up before a
forward, over a connection of the trainer's own thread.

A server. It begins empty or from its file (``checkpoints``), takes model, optimizer and rules from the first trainer that joins
(``Spec``), and serves until all trainers have left or are lost (``silence``).
"""
