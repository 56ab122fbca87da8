"""Several simulations, and their joint results.

``pool`` runs simulations on this machine's cores. ``seeds`` simulates one experiment under several seeds, and
``sweep`` at several values of its keys. ``what_if`` simulates it without each cause of its slowness.
``objective`` gives the tuner the step time of each strategy.
"""
