"""Pairs of words that a reader of Python's documentation expects close to each other, and how close some vectors have them.

The pairs were written down before anything was trained, from what the language calls alike, and none was changed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import normalize

PAIRS: tuple[tuple[str, str], ...] = (
    ("tuple", "list"),
    ("dictionary", "mapping"),
    ("keys", "values"),
    ("try", "except"),
    ("raise", "exception"),
    ("instance", "class"),
    ("function", "method"),
    ("import", "module"),
    ("int", "float"),
    ("float", "complex"),
    ("true", "false"),
    ("string", "bytes"),
    ("left", "right"),
    ("break", "continue"),
    ("breakpoint", "debugger"),
    ("local", "global"),
    ("positional", "keyword"),
    ("yield", "generator"),
    ("async", "await"),
    ("argument", "parameter"),
    ("arguments", "parameters"),
    ("mutable", "immutable"),
    ("getattr", "setattr"),
    ("enter", "exit"),
    ("iterator", "iterable"),
    ("width", "precision"),
    ("unicode", "ascii"),
    ("first", "last"),
    ("start", "stop"),
    ("base", "subclass"),
    ("equality", "comparison"),
    ("operator", "operand"),
    ("namespace", "scope"),
    ("iter", "next"),
    ("eq", "hash"),
    ("repr", "str"),
    ("leading", "trailing"),
    ("add", "sub"),
    ("global", "nonlocal"),
    ("statement", "expression"),
)
STRANGERS: tuple[tuple[str, str], ...] = tuple(
    (first, PAIRS[(place + len(PAIRS) // 2) % len(PAIRS)][1]) for place, (first, _) in enumerate(PAIRS)
)
"""The same words, as often, each with the partner of a word half the list away: what chance makes of words as frequent as these."""
SHOWN = ("tuple", "exception", "float", "import", "async", "left")
"""Words whose nearest are printed."""
NEAR = 10
"""The partner is found where it is among so many nearest words."""


def ranks(vectors: torch.Tensor, names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> list[int]:
    """The place of each pair's one word among all words by their cosine with the other, and the other way round; 1 is the nearest.

    ``vectors``: ``(words, dim)``, of ``names``. Raises ``ValueError`` for a word that is none of them.
    """
    unit = normalize(vectors.detach().double(), dim=1)
    found = []
    for one, other in pairs:
        for word, partner in ((one, other), (other, one)):
            row, wanted = names.index(word), names.index(partner)
            cosine = unit @ unit[row]
            nearer = cosine > cosine[wanted]
            nearer[row] = False
            found.append(1 + int(nearer.sum()))
    return found


def scores(vectors: torch.Tensor, names: Sequence[str], pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    """``hits``: the share of partners among the ``NEAR`` nearest; ``rank``: their mean place."""
    found = ranks(vectors, names, pairs)
    return {"hits": sum(rank <= NEAR for rank in found) / len(found), "rank": sum(found) / len(found)}
