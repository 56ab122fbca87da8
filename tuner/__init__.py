"""The tuner: searches the simulator, checks with real runs, recommends."""
