"""Parameter servers as processes: the servers, and the trainers' connections to them.

Start: ``real.job.served_launcher`` starts a user's script in every role; ``real.servers.served`` implements
``fleet`` there. ``leg_servers`` starts the servers of an experiment's leg.

Push: ``served_training`` hands the gradients of ``optimizer.step()`` to the thread of ``sender``. The thread sums
them, as ``fleetbench.plan.servers`` decides, cuts the sum into the servers' parts (``parameters``), and sends each
part over ``links``. ``server`` reads it (``parameters``), applies it and acknowledges it. In GeoSGD a push is a
delta.

Pull: the sender asks every server, and installs the dense parameters of the answers. The trainer's own thread has
separate connections: it looks up rows of embeddings before a forward, and asks for barriers and checkpoints.

Server: it begins empty or from its file (``checkpoints``), takes model, optimizer and rules (``Spec``) from the
first trainer that joins, and serves until all trainers have left. If a trainer's connection breaks before the
trainer has left, the job ends.
"""
