"""The loop of measure.py written out, with workers that are away: what departures and fresh optimizers cost DiLoCo itself.

From the repository's root: ``python reports/elastic/away.py`` writes held-out losses of two seeds to ``away.csv``, K = 32, one
core, two minutes: undisturbed; with a fresh AdamW for a random worker after 44 % of the rounds; and, too, with that worker's
distances left out of the two rounds that follow.
"""

from __future__ import annotations

import random

import measure
import torch
from torch.nn.functional import cross_entropy

SEEDS, K, SHARE = 2, 32, 61 / 140


def trained(share: float, rounds_away: int) -> list[float]:
    """Return each seed's held-out loss."""
    chance = random.Random(1)  # noqa: S311  # a seeded draw of events
    students = [[*measure.student(seed).parameters()] for seed in range(SEEDS)]
    ranks = [[torch.stack(own).detach().requires_grad_() for own in zip(*students, strict=True)] for _ in range(measure.WORKERS)]
    theta = [own.detach().clone().requires_grad_() for own in ranks[0]]
    inner = [torch.optim.AdamW(own, lr=measure.LR) for own in ranks]
    outer = torch.optim.SGD(theta, measure.CONFIGS["outer_lr"], measure.CONFIGS["outer_momentum"], nesterov=True)
    away = [0] * measure.WORKERS
    for step in range(1, measure.STEPS + 1):
        for rank, (first, first_bias, second, second_bias) in enumerate(ranks):
            batches = [measure.batch_of(seed, step, rank) for seed in range(SEEDS)]
            inputs, labels = torch.stack([one for one, _ in batches]), torch.cat([one for _, one in batches])
            hidden = torch.tanh(torch.baddbmm(first_bias[:, None], inputs, first.mT))
            scores = torch.baddbmm(second_bias[:, None], hidden, second.mT)
            inner[rank].zero_grad()
            (cross_entropy(scores.flatten(0, 1), labels, reduction="sum") / measure.BATCH).backward()
            inner[rank].step()
        if step % K:
            continue
        here = [own for own, rounds in zip(ranks, away, strict=True) if not rounds]
        with torch.no_grad():
            for place, own in enumerate(theta):
                own.grad = own - torch.stack([rank[place] for rank in here]).mean(dim=0)
        outer.step()
        with torch.no_grad():
            for parameters in ranks:
                for own, agreed in zip(parameters, theta, strict=True):
                    own.copy_(agreed)
        away = [max(0, rounds - 1) for rounds in away]
        if chance.random() < share:
            rank = chance.randrange(measure.WORKERS)
            away[rank], inner[rank] = rounds_away, torch.optim.AdamW(ranks[rank], lr=measure.LR)
    found = []
    for seed in range(SEEDS):
        network = measure.student(seed)
        with torch.no_grad():
            for parameter, own in zip(network.parameters(), theta, strict=True):
                parameter.copy_(own[seed])
        found.append(measure.held_out(network))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    with (measure.HERE / "away.csv").open("w", encoding="utf-8") as out:
        print("workers,seed,loss", file=out)
        for name, share, rounds_away in (("undisturbed", 0.0, 0), ("fresh AdamW", SHARE, 0), ("and away for two rounds", SHARE, 2)):
            for seed, loss in enumerate(trained(share, rounds_away)):
                print(f"{name},{seed},{loss:.4f}", file=out)
