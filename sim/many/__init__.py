"""Several simulations, and their joint results.

``pool`` runs simulations on this machine's cores, or on those of Ray (``on_ray``). ``seeds`` simulates one
experiment under several seeds, and ``sweep`` at several values of its keys; ``training`` has their virtual
trainers. ``what_if`` simulates it without each cause of its slowness.
``objective`` gives the tuner the step time of each strategy.
"""
