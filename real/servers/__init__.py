"""Parameter servers: processes that hold shards of the parameters, and the trainers' side of them, over ZeroMQ."""
