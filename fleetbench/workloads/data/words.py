"""Words: a text as numbered words, and the pairs of neighbours from which skip-gram learns.

As in Mikolov et al. 2013 (arXiv 1310.4546): rare words are dropped, frequent ones subsampled, and a window of
random width, at most ``window``, slides over the rest. A window ends at the end of a paragraph. Words are
lower-case ASCII letters; pairs are drawn once, by the seed.

Negatives are words that are not neighbours, drawn by their frequency to the power 3/4 at every step. They are
a function of seed, position and place in the joint batch only, so all ranks together read the same as one
process with the joint batch.
"""

import re
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fleetbench.digests import reading
from fleetbench.errors import ConfigError, EnvironmentLacks
from fleetbench.stragglers import Floats, Integers
from fleetbench.workload import Workload
from fleetbench.workloads.data.reader import Read, Vocabulary
from fleetbench.workloads.models.registry import SUBSAMPLE, data_source, model_option, sizes

_PARAGRAPH = -1
"""Marker in place of a word for the end of a paragraph."""
_TOKEN = re.compile(rb"[a-z]+|\n[ \t\r]*\n")
_ZIPF_EXPONENT = 1.3
_TOPICS = 8
"""Number of topics of synthetic pairs. Neighbours share a topic, which is the word's number modulo this."""
EXPONENT = 0.75
_PURPOSE = 2**64 - 1
"""Second word of the key of the draws of negatives, which no epoch uses; see ``Sampler``."""
HELD_OUT_POSITION = 2**63
"""Position for drawing the held-out split's negatives, which no step uses."""
_WORDS_A_COUNT = 4
"""Number of 64-bit words that Philox generates for each value of its counter."""


def read_pairs(workload: Workload, seed: int) -> Read:
    """Return pairs of a word and its neighbour, ``(pairs, 2)``, labelled 0.

    Raises ``ConfigError`` for a text that cannot be read or has no pairs.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, 1]))
    size, cap = sizes(workload, "pairs"), model_option(workload, "vocab")
    if data_source(workload) == "synthetic":
        return _synthetic(generator, size["samples"], cap)
    text, vocabulary = numbered(_text(workload), size["min_count"], cap)
    kept = subsample(text, vocabulary.counts, float(workload.data_options.get("subsample", SUBSAMPLE)), generator)
    pairs = neighbours(kept, size["window"], generator)
    if not len(pairs):
        hint = "a longer text, or a smaller workload.data_options.min_count"
        raise ConfigError("has no two words that are neighbours", "workload.data", repr(workload.data), hint)
    return Read(pairs, np.zeros(len(pairs), dtype=np.int64), vocabulary)


def numbered(text: bytes, min_count: int, cap: int) -> tuple[Integers, Vocabulary]:
    """Return the text as word numbers, and its vocabulary of at most ``cap`` words.

    They have at least ``min_count`` occurrences. Words with the same frequency are in alphabetical order. -1
    stands for the end of a paragraph.
    """
    tokens = [b"\n" if token.startswith(b"\n") else token for token in _TOKEN.findall(text.lower())]
    counts = Counter(token for token in tokens if token != b"\n")
    words = sorted((word for word, count in counts.items() if count >= min_count), key=lambda word: (-counts[word], word))[:cap]
    places = {word: place for place, word in enumerate(words)} | {b"\n": _PARAGRAPH}
    numbers = np.array([places[token] for token in tokens if token in places], dtype=np.int64)
    return numbers, Vocabulary(tuple(map(bytes.decode, words)), np.array([counts[word] for word in words], dtype=np.int64))


def kept_share(counts: Integers, threshold: float) -> Floats:
    """Return the share of each word's occurrences to keep: min(1, sqrt(threshold / frequency)) (equation 5)."""
    frequency = counts / max(1, counts.sum())
    shares: Floats = np.minimum(1.0, np.sqrt(threshold / np.maximum(frequency, np.finfo(float).tiny)))
    return shares


def subsample(text: Integers, counts: Integers, threshold: float, generator: np.random.Generator) -> Integers:
    """Return the text without randomly dropped occurrences; ends of paragraphs are kept."""
    shares = np.append(kept_share(counts, threshold), 1.0)  # the appended share is what -1 indexes: the end of a paragraph
    return text[generator.random(len(text)) < shares[text]]


def neighbours(text: Integers, window: int, generator: np.random.Generator) -> npt.NDArray[np.int32]:
    """Return all pairs of a middle word and a word at most w places away, w drawn from 1..``window``."""
    paragraph = np.cumsum(text == _PARAGRAPH)[text >= 0]
    words = text[text >= 0].astype(np.int32)
    width = generator.integers(1, window + 1, len(words))
    pairs: list[npt.NDArray[np.int32]] = []
    for distance in range(1, min(window, len(words) - 1) + 1):
        together = paragraph[:-distance] == paragraph[distance:]
        before, behind = words[:-distance], words[distance:]
        for middle, other, reach in ((before, behind, width[:-distance]), (behind, before, width[distance:])):
            chosen = together & (reach >= distance)
            pairs.append(np.stack([middle[chosen], other[chosen]], axis=1))
    return np.concatenate(pairs) if pairs else np.zeros((0, 2), dtype=np.int32)


def _synthetic(generator: np.random.Generator, num_pairs: int, vocab: int) -> Read:
    """Return pairs of words of one topic, both drawn from a Zipf law (exponent 1.3)."""
    topics = min(_TOPICS, vocab)
    per_topic = vocab // topics
    weights = np.arange(1, per_topic + 1) ** -_ZIPF_EXPONENT
    ranks = generator.choice(per_topic, (num_pairs, 2), p=weights / weights.sum())
    pairs = ranks * topics + generator.integers(0, topics, (num_pairs, 1))
    counts = np.bincount(pairs.reshape(-1), minlength=vocab)
    names = tuple(f"word{number}" for number in range(vocab))
    return Read(pairs.astype(np.int32), np.zeros(len(pairs), dtype=np.int64), Vocabulary(names, counts))


def _text(workload: Workload) -> bytes:
    if data_source(workload) == "text":
        return text_file(workload)
    topics_file()
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def text_file(workload: Workload) -> bytes:
    """Return the content of the file of ``text:FILE``. Raises ``ConfigError`` if it cannot be read."""
    path = workload.data.partition(":")[2]
    with reading(f"workload.data: {path}", "text:FILE names a file"):
        return Path(path).read_bytes()


def topics_file() -> Path:
    """Return the path of the file that ``pydocs`` stands for. Raises ``EnvironmentLacks`` if this Python has none."""
    found = find_spec("pydoc_data.topics")
    if found is None or found.origin is None:
        raise EnvironmentLacks("this Python comes without pydoc_data", "workload.data", "'pydocs'", "use text:FILE")
    return Path(found.origin)


class Negatives:
    """Draws negatives with probability counts^0.75 / sum(counts^0.75)."""

    def __init__(self, counts: Integers, num_negatives: int, seed: int) -> None:
        self._num = num_negatives
        self._key = np.array([seed % 2**64, _PURPOSE], dtype=np.uint64)
        weights = np.cumsum(counts.astype(np.float64) ** EXPONENT)
        self._below = weights / weights[-1]

    def drawn(self, position: int, first: int, number: int) -> Integers:
        """Return negatives of ``number`` samples, which begin at place ``first`` of the joint batch at ``position``."""
        begin = first * self._num
        skipped, rest = divmod(begin, _WORDS_A_COUNT)
        draws = np.random.Philox(key=self._key, counter=np.array([skipped, 0, position, 0], dtype=np.uint64))
        words = draws.random_raw(rest + number * self._num)[rest:]
        chosen = np.searchsorted(self._below, (words >> np.uint64(11)) * 2.0**-53, side="right")
        return chosen.astype(np.int64).reshape(number, self._num)
