"""Parameter servers: decisions of trainer, background sender and server. Events in, operations out."""
