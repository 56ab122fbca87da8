"""Several simulations, and their joint results.

``pool`` runs them over this machine's cores: ``seeds`` of one experiment, or a ``sweep`` of its values.
``what_if`` runs one without the causes of its slowness. ``objective`` gives the tuner the step time of each
strategy.
"""
