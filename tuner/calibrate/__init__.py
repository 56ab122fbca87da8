"""Calibration: parameters of an experiment, fitted to measured cells with the simulator as the model."""
