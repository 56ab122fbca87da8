"""words_plain.py for parameter servers: ``fleetbench launch --servers 1 --workers 2 examples/train_words.py [STRATEGY.toml]``.

Every process runs this script; those that are servers never get to the loop. By default GeoSGD: a trainer trains a copy of
its own, and a background sender exchanges what it touched in 100 steps.
"""

import re
import sys
from collections import Counter
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from fleetbench import DistributedStrategy, fleet

EPOCHS, BATCH, DIMENSION, WINDOW, NEGATIVES, RARE = 3, 200, 32, 5, 5, 5

text = re.findall("[a-z]+", " ".join(topics[name] for name in sorted(topics)).lower())
counts = {word: count for word, count in Counter(text).most_common() if count >= RARE}
numbers = {word: number for number, word in enumerate(counts)}
words = torch.tensor([numbers[word] for word in text if word in numbers])
share = torch.tensor(list(counts.values())) / len(words)

torch.manual_seed(0)
words = words[torch.rand(len(words)) < (1e-3 / share[words]).sqrt()]  # frequent words are thinned out
pairs = torch.cat([torch.stack([words[:-away], words[away:]], dim=1) for away in range(1, WINDOW + 1)])


class SkipGram(nn.Module):
    """Two tables of vectors: of words in the middle, and of words around them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(numbers), DIMENSION, sparse=True)
        self.contexts = nn.Embedding(len(numbers), DIMENSION, sparse=True)
        nn.init.uniform_(self.words.weight, -0.5 / DIMENSION, 0.5 / DIMENSION)
        nn.init.zeros_(self.contexts.weight)

    def forward(self, middle: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Scores ``(batch, n)`` of words ``(batch,)`` with n others of each ``(batch, n)``."""
        return (self.contexts(others) @ self.words(middle).unsqueeze(2)).squeeze(2)


model = SkipGram()
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)

geo_sgd = {"mode": "ps", "a_sync": True, "a_sync_configs": {"k_steps": 100}}
fleet.init(DistributedStrategy.load(sys.argv[1]) if len(sys.argv) > 1 else DistributedStrategy.from_dict(geo_sgd))
model = fleet.distributed_model(model)
optimizer = fleet.distributed_optimizer(optimizer)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()  # until every trainer has left
    sys.exit()
fleet.init_worker()

torch.manual_seed(1 + fleet.worker_index())
pairs = pairs[fleet.worker_index() :: fleet.worker_num()]  # every trainer learns from its own
for epoch in range(EPOCHS):
    for batch in pairs[torch.randperm(len(pairs))].split(BATCH):
        negatives = torch.multinomial(share**0.75, len(batch) * NEGATIVES, replacement=True).view(-1, NEGATIVES)
        scores = model(batch[:, 0], torch.cat([batch[:, 1:], negatives], dim=1))
        loss = -(logsigmoid(scores[:, 0]) + logsigmoid(-scores[:, 1:]).sum(1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if fleet.is_first_worker():
        print(f"[Epoch {epoch}] loss: {loss.item():.5f}")

fleet.pull_model()  # what everybody has learnt, as the servers hold it
if fleet.is_first_worker():
    vectors = nn.functional.normalize(model.words.weight.detach())
    for word in ("tuple", "exception", "import"):
        nearest = (vectors @ vectors[numbers[word]]).topk(6).indices[1:]
        print(f"{word}: {', '.join(list(numbers)[near] for near in nearest)}")
fleet.stop_worker()
