"""The real executor: executes a plan on processes, with torch.distributed."""
