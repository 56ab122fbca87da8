"""Calibration: fits parameters of an experiment to measured cells, with the simulator as the model."""
