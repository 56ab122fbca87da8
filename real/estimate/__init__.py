"""Layer tables of GPUs that are not there: a step's operations, counted on tensors without data, and a roofline of the named GPU."""
