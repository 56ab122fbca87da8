"""Several simulations, and what they say together.

``pool`` runs them over this machine's cores: ``seeds`` of one experiment, a ``sweep`` of its values.
``what_if`` runs one without what makes it slow; ``objective`` is what the tuner asks of every strategy.
"""
