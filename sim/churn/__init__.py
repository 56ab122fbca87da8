"""Churn: what a job achieves on nodes that leave and come back, above the simulation of its steps.

``availability`` says which nodes are there when, from a trace or from draws. ``job`` simulates one training on
them, whose rounds take as long as in the simulation of the experiment with so many nodes. ``goodput`` repeats
it over seeds, and ``intervals`` has Young's and Daly's intervals between checkpoints.
"""
