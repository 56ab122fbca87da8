"""gpt_plain.py with fleet's four lines: ``fleetbench launch --nproc 2 examples/gpt.py [--strategy FILE]``.

By default trainers take 20 updates alone, and an outer optimizer steps along the mean of what they changed (DiLoCo).
"""

import argparse
import math
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench import DistributedStrategy, fleet

DILOCO = {"k_steps": 20, "outer_lr": 0.7, "outer_momentum": 0.9}


class GPT(nn.Module):
    """A decoder of characters; each position sees those before it."""

    def __init__(self, characters: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Of characters ``(batch, length)`` the mean loss of each next one."""
        inputs, targets = text[:, :-1], text[:, 1:]
        hidden = self.blocks(self.characters(inputs) + self.positions, mask=self.mask, is_causal=True)
        return cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def read_pages() -> tuple[int, torch.Tensor, torch.Tensor]:
    """How many characters there are, their numbers in nine tenths of the pages, and those in the others."""
    numbers = {character: number for number, character in enumerate(sorted(set("".join(topics.values()))))}
    pages = [torch.tensor([numbers[character] for character in topics[name]]) for name in sorted(topics)]
    return len(numbers), torch.cat([page for place, page in enumerate(pages) if place % 10]), torch.cat(pages[::10])


def main() -> None:
    """Train, and look at the held-out text after every epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--updates", type=int, default=80, help="of an epoch")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--strategy")
    args = parser.parse_args()
    fleet.init(DistributedStrategy.load(args.strategy) if args.strategy else DistributedStrategy(localsgd=True, localsgd_configs=DILOCO))

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_characters, text, held_out = read_pages()
    text, held_out = text.to(device), held_out.to(device)
    windows = torch.arange(args.length + 1)
    torch.manual_seed(0)
    model = GPT(num_characters, args.length, args.width, args.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    total, warmup = args.epochs * args.updates, 20
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: min((update + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * update / total))
    )

    generator = torch.Generator().manual_seed(1 + fleet.worker_index())  # every trainer draws its own batches
    for epoch in range(args.epochs):
        model.train()
        for _ in range(args.updates):
            starts = torch.randint(len(text) - args.length, (args.batch, 1), generator=generator)
            loss = model(text[starts + windows])
            loss.backward()
            fleet.report(loss=loss)  # for a target, which a tuning of local steps needs
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        fleet.synchronize()
        model.eval()
        with torch.no_grad():
            held = model(held_out.unfold(0, len(windows), len(windows))[::4]).item()
        if fleet.is_first_worker():
            print(f"[Epoch {epoch}] loss: {loss.item():.5f}, held-out loss: {held:.5f}")


if __name__ == "__main__":
    main()
