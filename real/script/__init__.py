"""Legs in the user's own script: a command is started once, and strategies change between two of its optimizer steps.

``folder`` is all that driver and script have in common: a directory of small files. In the script,
``fleet.init`` finds it, ``legs`` joins and changes strategies where ``optimizer.step()`` returns,
``leg`` measures one of them, ``ending`` ends the script. Outside, ``launch`` starts the command and
watches it, ``session`` runs legs through one launch after another, and ``results`` makes of the
ranks' parts what a run of this project is.
"""
