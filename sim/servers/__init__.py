"""Parameter servers on the simulated clock: trainers, their background senders and servers, each a serialised event loop."""
