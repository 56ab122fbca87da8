"""Cases of the sharding tests, and what one process makes of the joint batches."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

STEPS = 6
BATCH = 6
TOKENS, WIDTH, CLASSES = 11, 7, 5
"""No number of rows divides by the number of trainers."""
CLIP = 0.05


class Block(nn.Module):
    """Two layers around an input that is added again."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, width)``."""
        return x + self.narrow(torch.tanh(self.wide(x)))


class Experts(Block):
    """One of two layers of one shape, by the turn."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.other = nn.Linear(WIDTH, hidden)
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(batch, width)``."""
        return x + self.narrow(torch.tanh((self.other if self.turn else self.wide)(x)))  # type: ignore[no-any-return]  # as Net's


class Net(nn.Module):
    """An embedding, a list of blocks, and a head; ``kind`` says what is unusual of it."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(TOKENS, WIDTH, sparse=kind == "sparse")
        self.blocks = nn.ModuleList(Block(hidden) for hidden in (9, 13, 6))
        if kind == "normed":
            self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS if kind == "tied" else CLASSES)
        if kind == "tied":
            self.head.weight = self.table.weight
        if kind == "tied blocks":
            self.blocks[1].wide.weight = self.blocks[0].wide.weight = nn.Parameter(torch.randn(9, WIDTH))
            self.blocks[1].wide.bias, self.blocks[1].narrow = (
                nn.Parameter(torch.zeros(9)),
                nn.Linear(9, WIDTH),
            )
        if kind == "frozen":
            self.blocks[1].requires_grad_(requires_grad=False)
            self.table.requires_grad_(requires_grad=False)
        if kind == "experts":
            self.blocks[1] = Experts(13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Class scores ``(batch, classes)`` of tokens ``(batch, 3)``, or of their embeddings ``(batch, width)``."""
        x = tokens if tokens.is_floating_point() else self.table(tokens).mean(dim=1)
        for block in self.blocks:
            x = block(x)
        if self.kind == "normed":
            x = self.norm(x)
        return self.head(x)  # type: ignore[no-any-return]  # a module's call is untyped


def net(kind: str = "plain", dtype: torch.dtype = torch.float64) -> Net:
    """A model whose initial parameters are always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Net(kind).to(dtype)


def joint_batch(step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels of all ranks, ranks one after another."""
    generator = torch.Generator().manual_seed(500 + step)
    tokens = torch.randint(0, TOKENS, (ranks * BATCH, 3), generator=generator)
    return tokens, torch.randint(0, CLASSES, (ranks * BATCH,), generator=generator)


def own_batch(step: int, rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's part of it."""
    tokens, labels = joint_batch(step, ranks)
    mine = slice(rank * BATCH, (rank + 1) * BATCH)
    return tokens[mine], labels[mine]


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """``momentum`` or ``adamw``, with weight decay."""
    parameters = [own for own in model.parameters() if own.requires_grad]
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.01)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """One training, by name."""

    name: str
    strategy: dict[str, Any] | None = field(default_factory=dict)
    """Beside ``sharding``; none: DistributedDataParallel."""
    configs: dict[str, Any] = field(default_factory=dict)
    """``sharding_configs``."""
    optimizer: str = "momentum"
    kind: str = "plain"
    dtype: str = "float64"
    loop: str = "plain"
    """``clip``, ``no_sync``, ``evaluate`` or ``adversarial``: what the loop does beside the usual."""
    merge: int = 1
    """Steps of an update, as one process trains them."""
    average: bool = True
    """Whether a merge divides."""
    rate: float = 1.0
    """Factor of the learning rate."""

    @property
    def looked_at(self) -> tuple[int, ...]:
        """The steps after which parameters are saved: of the first update and the last; with an overflow all."""
        return tuple(range(self.merge, STEPS + 1, self.merge if self.loop == "overflow" else STEPS - self.merge))


def _merge(k: int, *, avg: bool = True) -> dict[str, Any]:
    return {"gradient_merge": True, "gradient_merge_configs": {"k_steps": k, "avg": avg}}


STAGES = (1, 2, 3)
ON_TWO = (
    *(Case(name=f"stage {stage}", configs={"stage": stage}) for stage in STAGES),
    *(Case(name=f"stage {stage}, adamw", configs={"stage": stage}, optimizer="adamw") for stage in STAGES),
    *(Case(name=f"stage {stage}, merge", configs={"stage": stage}, strategy=_merge(3), merge=3) for stage in STAGES),
    Case(name="kept", configs={"stage": 3, "reshard_after_forward": False}),
    Case(name="replicated", configs={"stage": 3, "sharding_degree": 1}),
    Case(name="replicated, merge", configs={"stage": 1, "sharding_degree": 1}, strategy=_merge(3), merge=3),
    Case(name="blocks", configs={"stage": 3, "blocks": ("blocks.0", "blocks.0.wide", "blocks.2", "head")}),
    Case(name="merge, sum", configs={"stage": 2}, strategy=_merge(2, avg=False), merge=2, average=False),
    Case(name="clip", configs={"stage": 3}, loop="clip"),
    Case(name="merge, clip", configs={"stage": 1}, strategy=_merge(3), merge=3, loop="clip"),
    *(Case(name=f"stage {stage}, no_sync", configs={"stage": stage}, loop="no_sync") for stage in (1, 3)),
    *(Case(name=f"stage {stage}, evaluate", configs={"stage": stage}, loop="evaluate") for stage in (2, 3)),
    Case(name="merge, evaluate", configs={"stage": 1}, strategy=_merge(3), merge=3, loop="evaluate"),
    Case(name="merge, no_sync", configs={"stage": 2}, strategy=_merge(3), merge=3, loop="no_sync"),
    Case(name="adversarial", configs={"stage": 3}, loop="adversarial"),
    Case(name="merge, adversarial", configs={"stage": 1}, strategy=_merge(3), merge=3, loop="adversarial"),
    Case(
        name="recompute",
        configs={"stage": 3},
        strategy={"recompute": True, "recompute_configs": {"checkpoints": ("blocks.0", "blocks.1.wide")}},
    ),
    Case(name="lr_scale", configs={"stage": 2}, strategy={"lr_scale": 0.5}, rate=0.5),
    Case(name="fused", configs={"stage": 2}, strategy={"build_strategy": {"fuse_all_optimizer_ops": True}}, optimizer="adamw"),
    Case(name="tied", configs={"stage": 3}, kind="tied"),
    Case(name="frozen", configs={"stage": 3}, kind="frozen"),
    Case(name="synchronised norm", configs={"stage": 3}, strategy={"sync_batch_norm": True}, kind="normed"),
)
ON_FOUR = (
    *(
        Case(
            name=f"hybrid, {again}",
            configs={"stage": 3, "sharding_degree": 2, "reshard_after_forward": again},
        )
        for again in (True, False)
    ),
    Case(name="hybrid, clip", configs={"stage": 3, "sharding_degree": 2}, loop="clip"),
    Case(name="spread over 2", configs={"stage": 3, "reshard_after_forward": 2}),
    *(Case(name=f"hybrid {stage}", configs={"stage": stage, "sharding_degree": 2}) for stage in (1, 2)),
    *(
        Case(
            name=f"hybrid {stage}, merge",
            configs={"stage": stage, "sharding_degree": 2},
            strategy=_merge(3),
            merge=3,
        )
        for stage in STAGES
    ),
)
DDP = tuple(
    Case(name=f"ddp {kind} {optimizer}", strategy=None, kind=kind, optimizer=optimizer)
    for kind, optimizer in (("plain", "momentum"), ("plain", "adamw"))
)
SCALED = {"amp": True, "amp_configs": {"init_loss_scaling": 128.0, "decr_every_n_nan_or_inf": 1}}
BESIDE = (
    Case(name="ddp normed", strategy=None, kind="normed"),
    Case(name="normed", configs={"stage": 3}, kind="normed", loop="evaluate"),
    Case(name="bf16 wire", configs={"stage": 3}, strategy={"bf16_allreduce": True}, dtype="float32"),
    Case(name="by hand", strategy=None, loop="by hand", dtype="float32"),
    Case(name="float32", configs={"stage": 3}, dtype="float32"),
    Case(
        name="amp bf16",
        configs={"stage": 3},
        strategy={"amp": True, "amp_configs": {"dtype": "bf16"}},
        dtype="float32",
    ),
    Case(
        name="bf16 parameters",
        configs={"stage": 3, "param_dtype": "bfloat16"},
        strategy={"amp": True, "amp_configs": {"dtype": "bf16"}},
        dtype="float32",
    ),
    Case(name="bf16 parameters by hand", strategy=None, loop="bf16 parameters by hand", dtype="float32"),
    Case(name="amp fp16", configs={"stage": 3}, strategy=SCALED, dtype="float32", loop="overflow"),
    Case(
        name="amp fp16, merge",
        configs={"stage": 1},
        strategy={**SCALED, **_merge(2)},
        dtype="float32",
        loop="overflow",
        merge=2,
    ),
)


def _workers(k: int, outer: dict[str, Any] | None = None, **also: Any) -> dict[str, Any]:
    return {"localsgd": True, "localsgd_configs": {"k_steps": k, **(outer or {})}, **also}


DILOCO = {"outer_lr": 0.7, "outer_momentum": 0.9, "outer_nesterov": True}
WORKERS = (
    Case(name="two workers, averages", configs={"stage": 3, "sharding_degree": 2}, strategy=_workers(3)),
    Case(name="two workers, DiLoCo", configs={"stage": 3, "sharding_degree": 2}, strategy=_workers(3, DILOCO), optimizer="adamw"),
    Case(name="two workers, DiLoCo, K = 4", configs={"stage": 2, "sharding_degree": 2}, strategy=_workers(4, DILOCO)),
    Case(name="four workers, DiLoCo", configs={"stage": 1, "sharding_degree": 1}, strategy=_workers(2, DILOCO), optimizer="adamw"),
    Case(
        name="two workers, DiLoCo, merge",
        configs={"stage": 1, "sharding_degree": 2},
        strategy=_workers(2, {**DILOCO, "outer_nesterov": False}, **_merge(2)),
        merge=2,
        optimizer="adamw",
    ),
)
"""Workers of one or two of four trainers that update alone."""
HALF = 3
SAVED = (
    Case(name="saved in stage 3", configs={"stage": 3}, kind="normed", optimizer="adamw"),
    Case(name="saved in stage 1", configs={"stage": 1, "sharding_degree": 2}, kind="normed", optimizer="adamw"),
    Case(name="saved replicated", configs={"stage": 2, "sharding_degree": 1}, kind="normed", optimizer="adamw"),
    Case(name="saved with momentum", configs={"stage": 3}, optimizer="momentum"),
)
OVERFLOW = 4
"""The step in which the last rank's gradients overflow."""


def cases(ranks: int) -> tuple[Case, ...]:
    """All that so many ranks train."""
    return (*DDP, *(ON_TWO + BESIDE if ranks == 2 else ON_FOUR + WORKERS))


def flat(model: nn.Module) -> torch.Tensor:
    """All parameters as one vector of float64."""
    return torch.cat([own.detach().reshape(-1).double() for own in model.parameters()])


@functools.cache
def joint_training(case: Case, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``(updates, parameters)`` and the losses of one process that trains on the joint batches."""
    model = net(case.kind, getattr(torch, case.dtype))
    optimizer = optimizer_of(case.optimizer, model)
    for group in optimizer.param_groups:
        group["lr"] *= case.rate
    history, losses = [], []
    for step in range(1, STEPS + 1):
        tokens, labels = joint_batch(step, ranks)
        loss = cross_entropy(model(tokens), labels)
        (loss / case.merge if case.average else loss).backward()
        if step % case.merge == 0:
            if case.loop == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        if step in case.looked_at:
            history.append(flat(model))
        losses.append(loss.detach())
    return torch.stack(history), torch.stack(losses)


class Workers:
    """Workers of some trainers each, in one process: their loops written out."""

    def __init__(self, case: Case, ranks: int) -> None:
        assert case.strategy is not None
        self.case, self.ranks, self.size = case, ranks, case.configs["sharding_degree"]
        self.local = case.strategy["localsgd_configs"]
        self.models = [net(case.kind, getattr(torch, case.dtype)) for _ in range(ranks // self.size)]
        self.optimizers = [optimizer_of(case.optimizer, model) for model in self.models]
        self.agreed = [own.detach().clone() for own in self.models[0].parameters()]
        self.velocity = [torch.zeros_like(own) for own in self.agreed]
        self.updates = self.last_met = 0

    def step(self, step: int) -> None:
        """Every worker trains on its trainers' batches; after the last micro-batch of an update they meet if it is time."""
        for worker, model in enumerate(self.models):
            for rank in range(self.size):
                tokens, labels = own_batch(step, worker * self.size + rank, self.ranks)
                (cross_entropy(model(tokens), labels) / self.size / self.case.merge).backward()
        if step % self.case.merge:
            return
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.updates += 1
        is_first = self.updates == 1 and "outer_lr" not in self.local  # which ends with an average, too
        if is_first or self.updates - self.last_met >= self.local["k_steps"]:
            self.meet()

    def meet(self) -> None:
        """Average the distances, and step on them."""
        self.last_met, mu = self.updates, self.local.get("outer_momentum", 0.0)
        for agreed, velocity, *now in zip(self.agreed, self.velocity, *(model.parameters() for model in self.models), strict=True):
            distance = torch.stack([agreed - own.detach() for own in now]).mean(dim=0)
            velocity.mul_(mu).add_(distance)
            if "outer_lr" in self.local:
                distance = self.local["outer_lr"] * (distance + mu * velocity if self.local["outer_nesterov"] else velocity)
            agreed.sub_(distance)
            for own in now:
                own.data.copy_(agreed)


def workers_training(case: Case, ranks: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What workers have agreed on in the end, and the parameters of each after the first update."""
    workers, first = Workers(case, ranks), list[torch.Tensor]()
    for step in range(1, STEPS + 1):
        workers.step(step)
        if step == case.merge:
            first = [flat(model) for model in workers.models]
    if workers.updates > workers.last_met:
        workers.meet()
    return flat(workers.models[0]), first
