"""Parameter servers: what trainer, background sender and server decide. Events in, operations out; executing them is elsewhere."""
