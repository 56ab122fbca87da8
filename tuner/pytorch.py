"""PyTorch: a recommendation as settings of PyTorch itself, and of what wraps it: ``recommended.md``.

What DistributedDataParallel or ``fully_shard`` has an argument or a hook for needs no fleetbench afterwards. All else is applied
by ``fleetbench launch --strategy`` to the script as it is, or by the four lines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from fleetbench.config import encode, flat
from fleetbench.experiment import Experiment
from fleetbench.fields import CALLED
from fleetbench.plan.build import build_plan
from fleetbench.profile import table_for
from fleetbench.quantities import MIB
from fleetbench.strategy import DistributedStrategy
from fleetbench.why.observed import Library
from sim.scenario import setting_of

_ALL_IN_ONE_MB = 1 << 20
"""Cap of a bucket, in MiB, that no model reaches."""
_OF_PYTORCH = re.compile(
    r"(DistributedDataParallel|DataLoader|fully_shard)\(\.\.\., (.*?)\)|"
    r"model\.register_comm_hook\(None, [\w.]*default_hooks\.(\w+)_compress_hook\)"
)
_CALLS: dict[Library, str] = {
    "Accelerate": "Accelerator(..., kwargs_handlers=[DistributedDataParallelKwargs({})])",
    "Lightning": "Trainer(..., strategy=DDPStrategy({}))",
    "fleet": "DistributedStrategy(..., {})",  # of the searched ones broadcast_buffers alone, which has the same name
}
"""How a library is given arguments of DistributedDataParallel."""
_HOOKS: dict[Library, str] = {
    "Accelerate": "comm_hook=DDPCommunicationHookType.{1}",
    "Lightning": "ddp_comm_hook=default_hooks.{0}_compress_hook",
}
_SHARDING: dict[Library, str] = {
    "Trainer": 'TrainingArguments(..., fsdp_config={{..., "fsdp_version": 2, "reshard_after_forward": {}}})',
    "Accelerate": "FullyShardedDataParallelPlugin(..., fsdp_version=2, reshard_after_forward={})",
}
"""How a library is given what ``fully_shard`` does after a forward; a module of Lightning's calls it in ``configure_model`` itself."""
_SETTINGS = {
    "thread_num": "threads",
    "sharding_configs.sharding_degree": "degree",
}
"""Attributes of ``Settings`` that have the values of fields."""
_WIRES = {"fp16_allreduce": "fp16", "bf16_allreduce": "bf16"}


UNSHARDED = (
    "sharding",
    "find_unused_parameters",
    "build_strategy.enable_backward_optimizer_op_deps",
    "build_strategy.enable_sequential_execution",
    *(field for called in ("fusion", "hierarchy", "communicators", "local steps") for field in CALLED[called]),
)
"""Fields of a strategy that have no place beside sharding, and sharding itself."""


@dataclass(slots=True)
class Settings:
    """What of a strategy PyTorch has."""

    arguments: dict[str, object] = field(default_factory=dict)
    """Of DistributedDataParallel."""
    wire: str | None = None
    """``fp16`` or ``bf16``: its compression hook."""
    threads: int | None = None
    accumulate: int | None = None
    """Backwards an update."""
    lr_scale: float | None = None
    reshards: bool | int | None = None
    """The argument of ``fully_shard`` for blocks."""
    degree: int | None = None
    """Ranks of a shard group of ``fully_shard``, and of its mesh's last dimension."""
    policy: str = ""
    """Arguments of its ``MixedPrecisionPolicy``."""
    others: dict[str, object] = field(default_factory=dict)
    """Fields that PyTorch has no setting for."""

    @property
    def shards(self) -> bool:
        """Whether ``fully_shard`` is given anything."""
        return self.reshards is not None or self.degree is not None or bool(self.policy)


def bucket_sizes_mb(experiment: Experiment, strategy: DistributedStrategy) -> tuple[float, ...]:
    """Sizes in MiB of the strategy's buckets, in their order; none where they are not all dense and of one type."""
    table = table_for(experiment.replace(strategy=strategy))
    buckets = build_plan(strategy, table.by_readiness(), setting_of(experiment, table)).buckets
    if strategy.mode != "collective" or len({bucket.dtype for bucket in buckets}) != 1 or any(bucket.sparse for bucket in buckets):
        return ()
    return tuple(bucket.nbytes / MIB for bucket in buckets)


def in_pytorch(strategy: DistributedStrategy, default: DistributedStrategy, buckets_mb: Sequence[float] = ()) -> Settings:
    """What a strategy changes beside the default. ``buckets_mb``: sizes of its buckets, where DistributedDataParallel can have these."""
    found, (own, base) = Settings(), (dict(flat(encode(one))) for one in (strategy, default))
    told = _shard(found, strategy, default) if strategy.sharding else ()
    capped = strategy.fuse_all_reduce_ops and (strategy.fusion == "ddp" or (strategy.fusion == "fleet" and strategy.fuse_grad_count <= 1))
    laid_out = bool(buckets_mb) and strategy.fuses_by_cost and not strategy.is_local
    for name in [name for name in {**base, **own} if own.get(name) != base.get(name) and not name.startswith(told)]:
        if name in CALLED["fusion"] and laid_out:
            found.arguments["bucket_cap_mb_list"] = [*buckets_mb]
        elif name in ("fuse_grad_size_in_MB", "first_bucket_size_in_MB") and capped:
            found.arguments["bucket_cap_mb"] = strategy.fuse_grad_size_in_MB or _ALL_IN_ONE_MB
        elif name in ("find_unused_parameters", "broadcast_buffers"):
            found.arguments[name] = getattr(strategy, name)
        elif name in _WIRES and (strategy.fp16_allreduce or strategy.bf16_allreduce):
            found.wire = _WIRES[name] if getattr(strategy, name) else found.wire
        elif name in _SETTINGS and (default.sharding or name == "thread_num"):
            setattr(found, _SETTINGS[name], attrgetter(name)(strategy))
        elif name == "lr_scale":
            found.lr_scale = strategy.lr_scale / default.lr_scale
        elif name in ("gradient_merge", "gradient_merge_configs.k_steps") and strategy.gradient_merge_configs.avg:
            found.accumulate = strategy.gradient_merge_configs.k_steps
        elif name != "fuse_grad_count" or not capped:
            found.others[name] = own.get(name)
    return found


def _shard(found: Settings, strategy: DistributedStrategy, default: DistributedStrategy) -> tuple[str, ...]:
    """Fill in what ``fully_shard`` is given; returns how the names of the fields begin that this says."""
    is_new, again = not default.sharding, _reshards(strategy)
    if (policy := _policy(strategy)) != _policy(default) or is_new:
        found.policy = ", ".join(f"{name}=torch.{dtype}" for name, dtype in policy.items())
    if again != _reshards(default) or is_new:
        found.reshards = again
    if is_new:
        found.degree = strategy.sharding_configs.sharding_degree or None
        return (*_WIRES, *UNSHARDED, "broadcast_buffers")
    return (*_WIRES, "sharding_configs.param_dtype", "sharding_configs.stage", "sharding_configs.reshard_after_forward")


def _reshards(strategy: DistributedStrategy) -> bool | int:
    """What ``fully_shard`` is given for blocks: stages 1 and 2 do as blocks that stay gathered."""
    configs = strategy.sharding_configs
    return configs.stage == 3 and configs.reshard_after_forward


def _policy(strategy: DistributedStrategy) -> dict[str, str]:
    """Arguments of ``MixedPrecisionPolicy``; where nothing is said of gradients they would be reduced in the type of parameters."""
    short = strategy.sharding_configs.param_dtype
    wire = "float16" if strategy.fp16_allreduce else "bfloat16" if strategy.bf16_allreduce else "" if short == "own" else "float32"
    return {name: dtype for name, dtype in (("param_dtype", short.replace("own", "")), ("reduce_dtype", wire)) if dtype}


def page_of(strategy: DistributedStrategy, default: DistributedStrategy, line: str, buckets_mb: Sequence[float] = ()) -> str:
    """``recommended.md``: how to use a strategy, in PyTorch's own words where it has them; ``buckets_mb``: see ``in_pytorch``."""
    plain = in_pytorch(strategy, default, buckets_mb)
    parts = [f"# {line.partition(':')[0]}", "", line, ""]
    if plain.others:
        names = ", ".join(f"`{name} = {_toml(value)}`" for name, value in plain.others.items())
        parts += [f"PyTorch itself has no setting for {names}. fleetbench applies it:", *_by_fleetbench(strategy, default)]
        return "\n".join(parts)
    parts += ["## In plain PyTorch", ""]
    if plain.shards:
        where = "Beside the arguments that your script gives to it:" if default.sharding else "In the place of DistributedDataParallel:"
        parts += [where, "", "```python", *_shards(plain), "```", ""]
    if plain.arguments or plain.wire is not None:
        parts += ["Beside the arguments that your script gives it:", "", "```python", *_script(plain), "```", ""]
    parts += [f"- {text}" for text in _beside(plain)]
    if libraries := _libraries(plain):
        parts += ["", "## Where a library wraps the model", "", "| library | what to add |", "|---|---|"]
        parts += [f"| {name} | `{text}` |" for name, text in libraries.items()]
    return "\n".join([*parts, "", "## By fleetbench", *_by_fleetbench(strategy, default)])


def _script(plain: Settings) -> list[str]:
    given = "".join(f", {name}={value!r}" for name, value in plain.arguments.items())
    lines = ["from torch.nn.parallel import DistributedDataParallel", "", f"model = DistributedDataParallel(model{given})"]
    if plain.wire is not None:
        hook = f"{plain.wire}_compress_hook"
        lines = [f"from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import {hook}", *lines]
        lines.append(f"model.register_comm_hook(None, {hook})")
    return lines


def _shards(plain: Settings) -> list[str]:
    policy = "MixedPrecisionPolicy, " if plain.policy else ""
    lines, given = [f"from torch.distributed.fsdp import {policy}fully_shard", ""], ", mesh=mesh" if plain.degree else ""
    if plain.policy:
        given += ", mp_policy=policy"
        lines = ["import torch", *lines, f"policy = MixedPrecisionPolicy({plain.policy})"]
    if plain.degree:
        lines = [
            *([] if plain.policy else ["import torch"]),
            "import torch.distributed as dist",
            "from torch.distributed.device_mesh import init_device_mesh",
            *lines,
            'device = "cuda" if torch.cuda.is_available() else "cpu"',
            f"shape = (dist.get_world_size() // {plain.degree}, {plain.degree})",
            "# replicas need the same parameters before training starts: one seed on all ranks, or one checkpoint",
            'mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))',
        ]
    reshards = "" if plain.reshards is None else f", reshard_after_forward={plain.reshards}"
    return [
        *lines,
        "for block in blocks:  # the model's repeated modules",
        f"    fully_shard(block{given}{reshards})",
        f"fully_shard(model{given})",
    ]


def _beside(plain: Settings) -> list[str]:
    """What is not an argument of DistributedDataParallel."""
    said = []
    if plain.threads is not None:
        said.append(f"environment: `OMP_NUM_THREADS={plain.threads}`")
    if "bucket_cap_mb_list" in plain.arguments:
        said.append("`bucket_cap_mb_list` needs torch 2.13 or newer; its sizes are of this model's gradients, from the second step on")
    if plain.wire == "bf16":
        said.append("torch has this hook for NCCL; on gloo, `fleetbench launch` has it")
    if plain.lr_scale is not None:
        said.append(f"the optimizer's learning rate, and that of its schedule, times {plain.lr_scale:g}")
    if plain.accumulate is not None:
        k = plain.accumulate
        alone = "after `model.set_requires_gradient_sync(False)`" if plain.shards else "inside `model.no_sync()`"
        said.append(f"an update every {k} backwards, the loss divided by {k}: the first {k - 1} of them {alone}")
    return said


def in_words_of(library: Library, text: str) -> str:
    """What PyTorch is given in a text, as the library that calls PyTorch is given it."""

    def called(call: re.Match[str]) -> str:
        name, given, wire = call.groups()
        if name == "fully_shard":
            return _SHARDING[library].format(given.rpartition("=")[2]) if library in _SHARDING else call[0]
        if library == "Trainer" and name:
            prefix = "ddp_" if name == "DistributedDataParallel" else "dataloader_"
            return f"TrainingArguments(..., {prefix}{given.replace(', ', f', {prefix}')})"
        if wire and library == "Trainer":
            return f"fleetbench launch --strategy FILE -- COMMAND, FILE with {wire}_allreduce = true"
        if wire and library in _HOOKS:
            given = _HOOKS[library].format(wire, wire.upper())
        return _CALLS[library].format(given) if given and library in _CALLS and name != "DataLoader" else call[0]

    return _OF_PYTORCH.sub(called, text)


def _libraries(plain: Settings) -> dict[str, str]:
    if plain.shards:
        hsdp = f'ParallelismConfig(dp_replicate_size=int(os.environ["WORLD_SIZE"]) // {plain.degree}, dp_shard_size={plain.degree})'
        given: dict[str, str] = {} if plain.reshards is None else {name: text.format(plain.reshards) for name, text in _SHARDING.items()}
        if plain.degree:
            given = {"Accelerate": ", ".join([*filter(None, [given.get("Accelerate")]), f"Accelerator(..., parallelism_config={hsdp})"])}
        return given | {"Lightning": "ModelParallelStrategy(), whose module calls fully_shard in configure_model, as above"}
    if not plain.arguments and plain.wire is None and plain.accumulate is None:
        return {}
    names = {"bucket_cap_mb": "ddp_bucket_cap_mb", "find_unused_parameters": "ddp_find_unused_parameters"}
    names |= {"broadcast_buffers": "ddp_broadcast_buffers"}
    merge = [] if plain.accumulate is None else [f"gradient_accumulation_steps={plain.accumulate}"]
    is_ddps_alone = bool(plain.arguments.keys() - names.keys())  # which Trainer and Accelerate have no argument for
    trainer = [*(f"{names.get(name)}={value!r}" for name, value in plain.arguments.items()), *merge]
    handler, strategy = _spelled(plain.arguments), _spelled(plain.arguments)
    if plain.wire is not None:
        handler.append(f"comm_hook=DDPCommunicationHookType.{plain.wire.upper()}")
        strategy.append(f"ddp_comm_hook=default_hooks.{plain.wire}_compress_hook")
    accelerator = [*([f"kwargs_handlers=[DistributedDataParallelKwargs({', '.join(handler)})]"] if handler else []), *merge]
    lightning = [f"strategy=DDPStrategy({', '.join(strategy)})"] if strategy else []
    lightning += [] if plain.accumulate is None else [f"accumulate_grad_batches={plain.accumulate}"]
    found = {"Lightning": f"Trainer({', '.join(lightning)})"}
    if not is_ddps_alone:
        found = {"Accelerate": f"Accelerator({', '.join(accelerator)})"} | found
    if not is_ddps_alone and plain.wire is None:
        found = {"Hugging Face Trainer": f"TrainingArguments({', '.join(trainer)})"} | found
    return found


def _spelled(arguments: Mapping[str, object]) -> list[str]:
    return [f"{name}={value!r}" for name, value in arguments.items()]


def _by_fleetbench(strategy: DistributedStrategy, default: DistributedStrategy) -> list[str]:
    launch = "fleetbench launch --strategy recommended.toml -- torchrun --nproc-per-node N train.py"
    wrapped = "fully_shard" if default.sharding else "DistributedDataParallel(model)"
    lines = [
        "from fleetbench import fleet, DistributedStrategy",
        "",
        'fleet.init(DistributedStrategy.load("recommended.toml"))',
        f"model = fleet.distributed_model(model)  # in place of {wrapped}",
        *(["optimizer = torch.optim.AdamW(model.parameters())  # after it, as yours is"] if strategy.sharding else []),
        "optimizer = fleet.distributed_optimizer(optimizer)",
    ]
    as_it_is = [] if strategy.sharding and not default.sharding else ["```bash", launch, "```", "", "or, in the script:", ""]
    return ["", *as_it_is, "```python", *lines, "```", ""]


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
