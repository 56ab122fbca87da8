"""Why a script is slow: observes it unchanged, names causes, simulates remedies and tries them.

``explaining`` does all of it.
"""
