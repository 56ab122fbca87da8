"""The simulator: executes a plan on a simulated clock."""
