"""trainer_plain.py with fleet's four lines: ``torchrun --nproc-per-node 2 examples/trainer.py [--strategy FILE]``."""

import argparse
import contextlib
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from fleetbench import DistributedStrategy, fleet


@dataclass
class Output:
    """What the model returns."""

    loss: torch.Tensor
    logits: torch.Tensor


class Classifier(nn.Module):
    """A small transformer that reads a digit's rows of pixels."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.positions = nn.Parameter(torch.zeros(8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 10)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> Output:
        """``pixels``: (batch, 8, 8); ``labels``: (batch,)."""
        logits = self.head(self.encoder(self.embed(pixels) + self.positions).mean(dim=1))
        return Output(cross_entropy(logits, labels), logits)


def main() -> None:
    """Train, and look at the held-out digits behind every epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--warmup", type=float, default=0.1)
    parser.add_argument("--strategy")
    args = parser.parse_args()
    fleet.init(DistributedStrategy.load(args.strategy) if args.strategy else None)

    images, labels = load_digits(return_X_y=True)
    rows = [
        {"pixels": image, "labels": label}
        for image, label in zip(torch.tensor(images / 16, dtype=torch.float32).view(-1, 8, 8), torch.tensor(labels), strict=True)
    ]
    train_data, eval_data = rows[:1536], rows[1536:]
    torch.manual_seed(0)
    model = Classifier()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=args.lr)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer)
    sampler = DistributedSampler(train_data, fleet.worker_num(), fleet.worker_index(), drop_last=True)
    train_loader = DataLoader(train_data, args.batch, sampler=sampler, drop_last=True)
    eval_loader = DataLoader(eval_data, args.batch)
    updates = args.epochs * -(-len(train_loader) // args.accumulate)
    warmup = max(1, int(args.warmup * updates))
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: (update + 1) / warmup if update < warmup else (updates - update) / max(1, updates - warmup)
    )

    for epoch in range(args.epochs):
        model.train()
        sampler.set_epoch(epoch)
        for step, batch in enumerate(train_loader, 1):
            closes = step % args.accumulate == 0 or step == len(train_loader)
            with contextlib.nullcontext() if closes else model.no_sync():
                loss = model(**batch).loss
                (loss / args.accumulate).backward()
            if closes:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        fleet.synchronize()
        model.eval()
        correct = 0
        with torch.no_grad():
            for batch in eval_loader:
                correct += int((model(**batch).logits.argmax(dim=1) == batch["labels"]).sum())
        if fleet.is_first_worker():
            print(f"[Epoch {epoch}] loss: {loss.item():.5f}, accuracy: {correct / len(eval_data):.5f}")


if __name__ == "__main__":
    main()
