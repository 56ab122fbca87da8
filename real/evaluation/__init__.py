"""Evaluation: a stored model, run over a whole data set by one process."""
