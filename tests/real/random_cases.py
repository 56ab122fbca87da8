"""Random cases: a training loop as users write them and a strategy, drawn from a seed and a number.

A case is plain data, the same on every machine; ``str(case)`` shows what is not usual about it.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy

RANKS = 2
TINY = 0.0015
"""MiB of a bucket that holds a layer or two."""

Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training. The defaults are the usual loop under Fleet's defaults."""

    seed: int = 0
    index: int = 0
    strategy: Fields = field(default_factory=dict)
    model: str = "plain"
    """See ``random_loops.MODELS``."""
    num_layers: int = 3
    optimizer: str = "momentum"
    num_groups: int = 1
    steps: int = 6
    backwards: tuple[tuple[str, bool], ...] = (("batch", True),)
    """Of one step, each with whether it is outside of ``no_sync``; see ``random_loops.Loop``."""
    zero: str = "none after"
    """How and where gradients are cleared: ``none`` or ``zeros``, ``before`` the backwards or ``after`` the step."""
    edit: str = ""
    """What changes ``.grad`` between the backwards and the step."""
    scaler: str = ""
    """torch's ``GradScaler`` in the script: ``step`` alone, or ``unscale`` before the edit, too."""
    growth_interval: int = 100
    overflow: int = 0
    """The step in which rank 1's loss is infinite; 0: none."""
    closure: bool = False
    schedule: str = ""
    """Of the learning rate: ``shared``, or another ``by rank``."""
    drops: str = ""
    """A batch is thrown away before every third step: ``synced`` after a backward, ``kept`` after one inside of ``no_sync``, or
    after its ``forward``. ``last synced`` and ``last kept``: after the last step."""
    evaluates: bool = False
    epoch: int = 0
    """Steps of an epoch; 0: no end of one is told."""
    synchronizes: int = 0
    """The step after which ``fleet.synchronize`` is called; 0: none."""
    strides: bool = False
    """A parameter and a buffer have gaps in memory, and another parameter is transposed."""
    types: str = ""
    """Beside the others a parameter that is ``float32`` or ``complex``, or ``odd sizes``: one number, and none."""
    hook: str = ""
    """Hooks of the script's own clip gradients: ``tensor`` or ``parameter``, registered ``before`` or ``after`` ``distributed_model``."""
    second: str = ""
    """An optimizer that fleet does not hear of: ``beside`` the other, for the last layer, or a ``new`` one from the third step on. Or one
    for the last layer that fleet is ``given``."""
    turn: str = ""
    """Before the third step a layer ``thaws`` or ``freezes``."""
    writes: str = ""
    """A training forward writes a buffer that it reads: from its ``own`` batch, from those ``of all`` ranks, a count that is the same
    everywhere (``counts``), or its own, and the script has ``sent`` rank 0's before every forward."""
    mode: str = ""
    """``inference``: evaluations and ``fleet.synchronize`` run in it. ``default type``: torch's is bfloat16 while training."""
    by_rank: str = ""
    """How models differ: in the ``order`` of buffers, by ``one more``, in a ``shape``, or in what is ``frozen``."""
    large: bool = False
    """One parameter has gradients of 80,000 on rank 0 and 20,000 on rank 1: FP16 holds their mean, and not the first."""

    @classmethod
    def of(cls, data: Fields) -> Case:
        """The case that ``dataclasses.asdict`` made plain data of, which JSON may have carried."""
        return cls(**{**data, "backwards": tuple((kind, bool(synced)) for kind, synced in data["backwards"])})

    def __str__(self) -> str:
        usual = Case()
        names = [item.name for item in dataclasses.fields(self) if item.name not in ("seed", "index")]
        changed = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) != getattr(usual, name)]
        return f"--seed {self.seed} --case {self.index}: " + ", ".join(changed)

    # What a strategy is, for those who ask what is to be expected.

    @property
    def is_local(self) -> bool:
        """Whether trainers update alone."""
        return bool(self.strategy.get("localsgd") or self.strategy.get("adaptive_localsgd"))

    @property
    def averages_every_update(self) -> bool:
        """Whether that is all that Local SGD does."""
        return bool(self.strategy.get("localsgd")) and self.strategy.get("localsgd_configs", {}).get("k_steps", 1) == 1

    @property
    def merge(self) -> int:
        """Steps of an update."""
        return int(self.strategy.get("gradient_merge_configs", {}).get("k_steps", 1)) if self.strategy.get("gradient_merge") else 1

    @property
    def averages_alone(self) -> bool:
        """Whether gradients are averaged in every step, and wait for the optimizer as they are."""
        return not (self.is_local or self.merge > 1 or self.by_bucket or self.amp == "fp16")

    @property
    def treats_state(self) -> bool:
        """Whether an averaging does something to the optimizer's state."""
        local = self.strategy.get("localsgd_configs", {}) | self.strategy.get("adaptive_localsgd_configs", {})
        return local.get("momentum", "local") != "local" or local.get("optimizer_state", "local") != "local"

    @property
    def by_bucket(self) -> bool:
        """Whether a bucket's parameters update in the backward."""
        return not self.build("enable_backward_optimizer_op_deps", True)

    @property
    def finds_unused(self) -> bool:
        """Whether parameters may be without gradient."""
        return bool(self.strategy.get("find_unused_parameters"))

    @property
    def amp(self) -> str:
        """``fp16``, ``bf16``, or nothing."""
        return str(self.strategy.get("amp_configs", {}).get("dtype", "fp16")) if self.strategy.get("amp") else ""

    @property
    def wire(self) -> str:
        """In which type gradients travel, where it is not their own."""
        return "fp16" if self.strategy.get("fp16_allreduce") else "bf16" if self.strategy.get("bf16_allreduce") else ""

    @property
    def dtype(self) -> str:
        """The parameters'."""
        return "float32" if self.amp else "float64"

    @property
    def skips(self) -> bool:
        """Whether a scaler in the script leaves a step out."""
        return bool(self.scaler and self.overflow)

    @property
    def num_exchanges(self) -> int:
        """Backwards of a step outside of ``no_sync``."""
        return sum((2 if kind == "two losses" else 1) if synced else 0 for kind, synced in self.backwards)

    @property
    def penalises_beside_gradients(self) -> bool:
        """Whether ``torch.autograd.grad`` runs while there are gradients in ``.grad``."""
        kinds = [kind for kind, _ in self.backwards]
        return any("penalty" in kind and (place or "zeros" in self.zero) for place, kind in enumerate(kinds))

    def build(self, name: str, default: object) -> Any:
        """A field of ``build_strategy``."""
        return self.strategy.get("build_strategy", {}).get(name, default)

    def features(self) -> frozenset[str]:
        """Short names of all that is not usual about it, for coverage."""
        loop = {
            f"model {self.model}": self.model != "plain",
            f"optimizer {self.optimizer}": True,
            "two groups": self.num_groups > 1,
            "no_sync": any(not synced for _, synced in self.backwards),
            "several exchanges": self.num_exchanges > 1,
            f"zero_grad {self.zero}": True,
            f"edit {self.edit}": bool(self.edit),
            "own scaler": bool(self.scaler),
            "scale grows": bool(self.scaler) and self.growth_interval < self.steps,
            "overflow on one rank": bool(self.overflow),
            "closure": self.closure,
            f"lr {self.schedule}": bool(self.schedule),
            f"drops {self.drops}": bool(self.drops),
            "strides": self.strides,
            f"types {self.types}": bool(self.types),
            f"hook {self.hook}": bool(self.hook),
            f"second optimizer {self.second}": bool(self.second),
            f"layer {self.turn}": bool(self.turn),
            f"buffer {self.writes}": bool(self.writes),
            f"mode {self.mode}": bool(self.mode),
            f"by rank {self.by_rank}": bool(self.by_rank),
            "evaluates": self.evaluates,
            "epochs": bool(self.epoch),
            "synchronizes": bool(self.synchronizes),
            "large gradients": self.large,
        } | {f"backward {kind}": kind != "batch" for kind, _ in self.backwards}
        local = self.strategy.get("localsgd_configs", {}) | self.strategy.get("adaptive_localsgd_configs", {})
        strategy = {
            "synchronous": not self.is_local and self.merge == 1,
            "Local SGD": bool(self.strategy.get("localsgd")),
            "adaptive K": bool(self.strategy.get("adaptive_localsgd")),
            **{f"{name} {local.get(name)}": name in local for name in ("schedule", "variant", "momentum", "buffers", "optimizer_state")},
            "merge of 1": bool(self.strategy.get("gradient_merge")) and self.merge == 1,
            "merge": self.merge > 1,
            "merge sums": self.merge > 1 and not self.strategy["gradient_merge_configs"].get("avg", True),
            f"remainder {self.strategy.get('gradient_merge_configs', {}).get('remainder', 'carry')}": self.merge > 1 and bool(self.epoch),
            "update by bucket": self.by_bucket,
            "fused update": self.build("fuse_all_optimizer_ops", False),
            "sequential": self.build("enable_sequential_execution", False),
            f"wire {self.wire}": bool(self.wire),
            f"amp {self.amp}": bool(self.amp),
            "finds unused": self.finds_unused,
            "recompute": bool(self.strategy.get("recompute")),
            "several communicators": self.strategy.get("nccl_comm_num", 1) > 1,
            "free communicators": not self.strategy.get("sync_nccl_allreduce", True),
            "hierarchy": bool(self.strategy.get("use_hierarchical_allreduce")),
            f"fusion {self.strategy.get('fusion', 'fleet')}": self.strategy.get("fuse_all_reduce_ops", True),
            "unfused": not self.strategy.get("fuse_all_reduce_ops", True),
        }
        return frozenset(name for name, present in (loop | strategy).items() if present)


KNOWN: dict[str, Callable[[Case], bool]] = {
    "own GradScaler and updates by bucket": lambda case: bool(case.scaler) and case.by_bucket,
    "own GradScaler whose scale grows within a merge": lambda case: bool(case.scaler) and case.growth_interval < 4 and case.merge > 1,
    "own GradScaler, a merge, an overflow on one rank": lambda case: bool(case.scaler and case.overflow) and case.merge > 1,
    "own GradScaler, Local SGD, an overflow on one rank": lambda case: bool(case.scaler and case.overflow) and case.is_local,
    "adaptive K and learning rates by rank": lambda case: bool(case.strategy.get("adaptive_localsgd")) and case.schedule == "by rank",
    "unused parameters whose gradients are zeros": lambda case: (
        case.model == "gated" and case.finds_unused and "zeros" in case.zero and not case.is_local
    ),
    "gradient penalty beside kept gradients, and a merge": lambda case: case.merge > 1 and case.penalises_beside_gradients,
    "gradient penalty, unused parameters, and a merge": lambda case: (
        case.merge > 1 and case.finds_unused and any("penalty" in kind for kind, _ in case.backwards)
    ),
    "Local SGD, a merge of 1, sparse gradients": lambda case: (
        case.is_local and case.merge == 1 and bool(case.strategy.get("gradient_merge")) and case.model == "sparse"
    ),
    "FP16 on the wire and large gradients": lambda case: case.wire == "fp16" and case.large,
    "uncounted writes to gradients, and updates by bucket": lambda case: case.edit == "data mul" and case.by_bucket,
    "a gradient taken away before a fused update": lambda case: (
        case.edit == "drop one" and case.build("fuse_all_optimizer_ops", False) and not case.finds_unused
    ),
    "two backwards of one graph, and updates by bucket": lambda case: (
        case.by_bucket and any(kind == "two losses" and synced for kind, synced in case.backwards)
    ),
    "a penalty on gradients, and a loss scale": lambda case: case.amp == "fp16" and any("penalty" in kind for kind, _ in case.backwards),
    "a parameter with gaps in memory": lambda case: case.strides,
    "a hook registered after distributed_model": lambda case: case.hook.endswith("after") and not case.is_local,
    "an optimizer that fleet does not know": lambda case: case.second in ("beside", "new") and (case.is_local or case.merge > 1),
    "state averaged of what the optimizer does not hold": lambda case: (
        case.second == "beside"
        and "average" in str(case.strategy.get("localsgd_configs", {}) | case.strategy.get("adaptive_localsgd_configs", {}))
    ),
    "a layer that is frozen in the middle": lambda case: case.turn == "freezes",
    "a layer that is unfrozen in the middle": lambda case: case.turn == "thaws",
    "a buffer that the forward writes": lambda case: case.writes == "own" and not case.is_local,
    "models that differ by rank": lambda case: bool(case.by_rank),
}
"""What this campaign has found, as combinations that its cases must keep drawing."""


def draw(seed: int, index: int) -> Case:
    """The case of a seed and a number; seed 1 has what the first campaign drew."""
    source = random.Random(f"{seed}/{index}")  # noqa: S311  # no secrets are made of it
    while True:
        case = _draw(source, seed, index)
        try:
            DistributedStrategy.from_dict(case.strategy)
        except ConfigError:
            if source.random() > 0.05:  # a few contradictions, which must be refused
                continue
        more = case if seed == 1 else _with_more(_Dice(source), case)
        return more if seed in (1, 2) else _with_given(_Dice(source), more)


class _Dice:
    def __init__(self, source: random.Random) -> None:
        self._source = source

    def chance(self, share: float) -> bool:
        return self._source.random() < share

    def one(self, *choices: Any) -> Any:
        return self._source.choice(choices)

    def weighted(self, **weights: float) -> str:
        return self._source.choices(list(weights), list(weights.values()))[0].replace("_", " ")


def _draw(source: random.Random, seed: int, index: int) -> Case:
    dice = _Dice(source)
    family = dice.weighted(synchronous=30, by_bucket=10, merge=22, local=14, adaptive=14, local_merge=10)
    model = dice.weighted(plain=30, gated=14, sparse=9, tied=8, normed=9, checkpointed=7, reentrant=5, frozen=7, nested=6)
    strategy = _strategy(dice, family, model)
    is_local = family in ("local", "adaptive", "local merge")
    amp = bool(strategy.get("amp"))
    optimizer = dice.weighted(sgd=15, momentum=45, nesterov=10, adam=15, adamw=10)
    if model == "sparse":
        optimizer = "sgd"
    if is_local and optimizer in ("adam", "adamw") and dice.chance(0.85):
        name = "adaptive_localsgd_configs" if family == "adaptive" else "localsgd_configs"
        strategy[name] = {**strategy.get(name, {}), "optimizer_state": "average"}
        if strategy[name].get("momentum") == "reset":
            del strategy[name]["momentum"]
    scaler = dice.one("step", "unscale") if dice.chance(0.16) and not amp else ""
    closure = not scaler and dice.chance(0.08)
    return Case(
        seed=seed,
        index=index,
        strategy=strategy,
        model=model,
        num_layers=dice.one(3, 4, 5),
        optimizer=optimizer,
        num_groups=2 if dice.chance(0.15) else 1,
        steps=dice.one(4, 5, 6, 7, 8),
        backwards=_backwards(dice, model, again={"merge": 0.1, "local merge": 0.1, "by bucket": 0.25}.get(family, 0.1 if amp else 0.5)),
        zero=dice.weighted(none_after=45, zeros_after=30, none_before=10, zeros_before=15),
        edit="" if model == "sparse" or dice.chance(0.6) else dice.one(*EDITS),
        scaler=scaler,
        growth_interval=dice.one(2, 3, 100) if scaler else 100,
        overflow=dice.one(1, 2, 3) if (scaler or strategy.get("amp_configs", {}).get("dtype") == "fp16") and dice.chance(0.3) else 0,
        closure=closure,
        schedule=dice.weighted(none=50, shared=25, by_rank=25).replace("none", ""),
        drops="synced" if not closure and dice.chance(0.05) else "",
        evaluates=dice.chance(0.15),
        epoch=dice.one(2, 3, 4) if dice.chance(0.3) else 0,
        synchronizes=dice.one(2, 3, 4) if dice.chance(0.1) else 0,
        large=not amp
        and not scaler
        and dice.chance(0.4 if "fp16_allreduce" in strategy else 0.05)
        and strategy.get("gradient_merge_configs", {}).get("avg", True),  # a sum of them is beyond FP16
    )


def _with_more(dice: _Dice, case: Case) -> Case:
    """The case with some of what was drawn in no case of seed 1."""
    more: Fields = {}
    plain = not (case.amp or case.scaler or case.closure)
    if dice.chance(0.12):
        more["strides"] = True
    if dice.chance(0.12) and not case.amp and case.edit != "clip value":
        more["types"] = dice.weighted(float32=45, odd_sizes=45, complex=10)
    if dice.chance(0.15) and case.amp != "fp16" and not case.scaler:
        more["hook"] = f"{dice.one('tensor', 'parameter')} {dice.one('before', 'after', 'after')}"
    if dice.chance(0.15) and plain and case.model != "sparse":
        more["second"] = dice.one("beside", "new")
    if dice.chance(0.12):
        more["turn"] = "thaws" if case.model == "frozen" else "freezes"
    if dice.chance(0.15) and not case.overflow:  # where a rank ends alone, the other waits in its own forward
        more["writes"] = dice.one("own", "of all", "counts", "sent")
    if dice.chance(0.15) and not case.closure:
        more["drops"] = dice.one("synced", "kept", "forward", "last synced", "last kept")
    if dice.chance(0.15):
        more["mode"] = dice.one("inference", "default type")
        more["evaluates"] = case.evaluates or more["mode"] == "inference"
    if dice.chance(0.04):
        more["by_rank"] = dice.one("order", "one more", "shape", "frozen")
    return dataclasses.replace(case, **more)


def _with_given(dice: _Dice, case: Case) -> Case:
    """The case with a second optimizer that fleet is given, which no case of seeds 1 and 2 has."""
    plain = not (case.amp or case.scaler or case.closure or case.treats_state or case.model == "sparse")
    return dataclasses.replace(case, second="given") if plain and dice.chance(0.25) else case


EDITS = ("clip norm", "clip value", "data mul", "mul", "replace", "drop one", "zero one")


def _backwards(dice: _Dice, model: str, again: float) -> tuple[tuple[str, bool], ...]:
    """``again``: how often a backward before the last one is outside of ``no_sync``, too."""
    kinds = {"batch": 62, "two forwards": 8, "two losses": 8, "penalty": 10, "parameter penalty": 6, "create graph": 6}
    if model in ("sparse", "reentrant"):
        kinds = {"batch": 80, "two forwards": 10, "two losses": 10}
    count = 1 if dice.chance(0.6) else dice.one(2, 3)
    found = [
        (dice.weighted(**{kind.replace(" ", "_"): weight for kind, weight in kinds.items()}), dice.chance(again)) for _ in range(count)
    ]
    kind, _ = found[-1]
    if kind == "two losses" and dice.chance(1 - again):
        kind = "one of two losses"
    return (*found[:-1], (kind, True))


def _strategy(dice: _Dice, family: str, model: str) -> Fields:
    fields: Fields = {}
    fields |= dice.one(
        {"fuse_grad_size_in_MB": TINY},
        {"fuse_grad_size_in_MB": TINY},
        {"fusion": "ddp", "fuse_grad_size_in_MB": TINY},
        {},
        {"fuse_grad_size_in_MB": 0.0},
        {"fuse_grad_count": 2},
        {"fuse_all_reduce_ops": False},
        {"fusion": "by_number", "fuse_grad_size_in_num": 2, "last_comm_group_size_MB": 0.0005},
        {"fusion": "merged_gradient"},
    )
    is_local = family in ("local", "adaptive", "local merge")
    fields |= _exchange(dice, is_local=is_local) | _compute(dice, family, model)
    if family in ("merge", "local merge") or dice.chance(0.08):
        fields |= {"gradient_merge": True, "gradient_merge_configs": _merge(dice, family)}
    if family in ("local", "local merge"):
        fields |= {"localsgd": True, "localsgd_configs": _local(dice)}
    if family == "adaptive":
        fields |= {"adaptive_localsgd": True, "adaptive_localsgd_configs": _adaptive(dice, amp="amp" in fields)}
    return fields


def _exchange(dice: _Dice, *, is_local: bool) -> Fields:
    fields: Fields = {}
    if dice.chance(0.3):
        fields["nccl_comm_num"] = dice.one(2, 3)
    if dice.chance(0.25):
        fields["sync_nccl_allreduce"] = False
    if dice.chance(0.03):
        fields["use_hierarchical_allreduce"] = True
    if dice.chance(0.16) and not is_local:
        fields[dice.one("fp16_allreduce", "bf16_allreduce")] = True
    return fields


def _compute(dice: _Dice, family: str, model: str) -> Fields:
    fields: Fields = {}
    if dice.chance(0.9 if model == "gated" else 0.08):
        fields["find_unused_parameters"] = True
    if dice.chance(0.12) and model != "sparse":
        fields["amp"] = True
        fields["amp_configs"] = {"dtype": "bf16"} if dice.chance(0.4) else {"dtype": "fp16", "init_loss_scaling": 128.0}
    if dice.chance(0.08) and model not in ("checkpointed", "reentrant"):
        fields |= {"recompute": True, "recompute_configs": {"checkpoints": ["first"]}}
    build: Fields = {}
    if family == "by bucket":
        build["enable_backward_optimizer_op_deps"] = False
    elif dice.chance(0.15):
        build["fuse_all_optimizer_ops"] = True
    if dice.chance(0.06):
        build["enable_sequential_execution"] = True
    return fields | ({"build_strategy": build} if build else {})


def _merge(dice: _Dice, family: str) -> Fields:
    configs: Fields = {"k_steps": dice.one(2, 3) if "merge" in family and dice.chance(0.85) else 1}
    if dice.chance(0.25):
        configs["avg"] = False
    if dice.chance(0.4):
        configs["remainder"] = dice.one("flush", "drop")
    if dice.chance(0.1):
        configs["batch_norm_per"] = "update"
    return configs


def _local(dice: _Dice) -> Fields:
    schedule = dice.weighted(fleet=60, document=20, torch=20)
    configs: Fields = {"k_steps": dice.one(1, 2, 3, 4), "schedule": schedule}
    if schedule == "document":
        configs |= {"warmup_epochs": dice.one(0, 1), "warmup": dice.one("exp", "const", "linear")}
    else:
        configs["begin_step"] = dice.one(1, 1, 2, 3)
    return configs | _policies(dice)


def _adaptive(dice: _Dice, *, amp: bool) -> Fields:
    """Under mixed precision by the learning rate alone: a rounded loss may fall on the other side of a whole number of steps."""
    variant = "qsr" if amp else dice.one("fleet", "paper", "document", "qsr")
    configs: Fields = {"init_k_steps": dice.one(1, 2, 3), "begin_step": dice.one(1, 1, 2), "variant": variant}
    if variant == "qsr":
        configs["alpha"] = dice.one(0.06, 0.09)
    return configs | _policies(dice)


def _policies(dice: _Dice) -> Fields:
    found = {}
    if dice.chance(0.3):
        found["momentum"] = dice.one("reset", "average")
    if dice.chance(0.2):
        found["buffers"] = "average"
    return found


DOCUMENTED: dict[str, tuple[str, Callable[[Case], bool]]] = {
    "two settings of a strategy contradict each other (docs/combinations.md)": (
        "exclude each other",
        lambda _: True,
    ),
    "a second backward outside of no_sync, where gradients have been merged, unscaled or used (docs/loops.md)": (
        "a second backward comes before optimizer.step\\(\\), and (?!the first)",
        lambda case: (
            (case.num_exchanges > 1 or bool(case.drops) or case.skips or case.second == "new")
            and (case.merge > 1 or case.by_bucket or case.amp == "fp16")
        ),
    ),
    "under Local SGD gradients are thrown away after a backward (docs/loops.md)": (
        "the first one's gradients were thrown away",
        lambda case: case.is_local and (bool(case.drops) or case.skips),
    ),
    "unused parameters without find_unused_parameters (docs/exchange.md)": (
        "got no gradient in this step",
        lambda case: case.model == "gated" and not case.finds_unused,
    ),
    "a layer is frozen after distributed_model, without find_unused_parameters (docs/loops.md)": (
        "was frozen \\(requires_grad = False\\)",
        lambda case: case.turn == "freezes" and not case.finds_unused,
    ),
    "a layer is unfrozen after distributed_model (docs/loops.md)": (
        "requires gradients \\(requires_grad = True\\) since|did not require gradients when it was distributed",
        lambda case: case.turn == "thaws",
    ),
    "an optimizer that fleet does not know, under local steps, gradient merge or a loss scale (docs/loops.md)": (
        "has stepped parameters of the model, and was not given to fleet",
        lambda case: case.second in ("beside", "new") and not case.averages_alone and not case.by_bucket,
    ),
    "an epoch's end or a meeting, where fleet's optimizer has not stepped since the last backward (docs/loops.md)": (
        "fleet.(end_epoch|synchronize): comes in the middle of a step",
        lambda case: not case.averages_alone and (case.second == "new" or case.drops == "last synced"),
    ),
    "a complex parameter (the error names it)": (
        "is not a gradient's type",
        lambda case: case.types == "complex",
    ),
    "models differ by rank (docs/loops.md)": (
        "the model: differs between rank R and rank R",
        lambda case: bool(case.by_rank),
    ),
    "gradients are changed after an update by bucket (docs/loops.md)": (
        "gradients were changed after the backward",
        lambda case: case.by_bucket and bool(case.edit),
    ),
    "Local SGD that averages after every update with Adam, whose state it does not average (docs/local_sgd.md)": (
        "is not a step of averages",
        lambda case: case.averages_every_update and (case.optimizer in ("adam", "adamw") or case.second == "given"),
    ),
    "a GradScaler of the script's own, where gradients are merged or used before its step, or under Local SGD (docs/loops.md)": (
        "is called by a GradScaler of the script's own",
        lambda case: bool(case.scaler) and (case.merge > 1 or case.is_local or case.by_bucket),
    ),
    "a closure (docs/loops.md)": (
        "must be called without arguments",
        lambda case: case.closure and (not case.averages_alone or case.build("fuse_all_optimizer_ops", False)),
    ),
    "a part checkpointed with use_reentrant=True that runs twice in a backward, as DDP refuses it (docs/loops.md)": (
        "twice in one backward|ready only once",
        lambda case: case.model == "reentrant" and any(kind == "two forwards" for kind, _ in case.backwards),
    ),
    "unused parameters that the loss reaches beside the model's outputs, or in two forwards, as DDP refuses them (docs/loops.md)": (
        "ready only once",
        lambda case: (
            bool(case.strategy.get("find_unused_parameters"))
            and any(kind in ("two forwards", "parameter penalty") for kind, _ in case.backwards)
        ),
    ),
    "the graph of gradients is kept where they are averaged (docs/loops.md)": (
        "keeps the graph of gradients that are averaged",
        lambda case: not case.is_local and any(kind == "create graph" for kind, _ in case.backwards),
    ),
    "the graph of gradients is kept under a loss scale (docs/loops.md)": (
        "keeps the graph of gradients",
        lambda case: case.amp == "fp16" and any("penalty" in kind or kind == "create graph" for kind, _ in case.backwards),
    ),
    "sparse gradients under Local SGD with merges or a fused update (the error names it)": (
        "has sparse gradients, which Local SGD",
        lambda case: case.model == "sparse" and case.is_local and (case.merge > 1 or case.build("fuse_all_optimizer_ops", False)),
    ),
}
"""What a case may be refused for: where it is said, how the error reads, and which cases it is to be expected of."""


def documented(case: Case, reason: str) -> str:
    """Where a refusal is announced; nothing where a case is refused that is to train."""
    return next((where for where, (pattern, concerns) in DOCUMENTED.items() if re.search(pattern, reason) and concerns(case)), "")
