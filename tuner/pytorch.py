"""PyTorch: translates a strategy into settings of PyTorch and of libraries that wrap it (``recommended.md``).

A setting for which DistributedDataParallel or ``fully_shard`` has an argument or a hook needs no fleetbench.
``fleetbench launch --strategy`` applies the others to an unchanged script; four lines in the script do the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
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
_OF_PYTORCH = re.compile(r"(DistributedDataParallel|DataLoader|fully_shard)\(\.\.\., (.*?)\)")
_CALLS: dict[Library, str] = {
    "Accelerate": "Accelerator(..., kwargs_handlers=[DistributedDataParallelKwargs({})])",
    "Lightning": "Trainer(..., strategy=DDPStrategy({}))",
    "fleet": "DistributedStrategy(..., {})",  # the only searched argument is broadcast_buffers, which has the same name
}
"""Call that passes arguments of DistributedDataParallel, in place of ``{}``, to each library."""
_HOOKS: dict[Library, str] = {
    "Accelerate": "comm_hook=DDPCommunicationHookType.{1}",
    "Lightning": "ddp_comm_hook=default_hooks.{0}_compress_hook",
}
_SHARDING: dict[Library, str] = {
    "Trainer": 'TrainingArguments(..., fsdp_config={{..., "fsdp_version": 2, "reshard_after_forward": {}}})',
    "Accelerate": "FullyShardedDataParallelPlugin(..., fsdp_version=2, reshard_after_forward={})",
}
"""Call that passes ``reshard_after_forward`` of ``fully_shard`` to each library. With Lightning, the user's module
calls ``fully_shard`` itself, in ``configure_model``."""
_SETTINGS = {
    "thread_num": "threads",
    "sharding_configs.sharding_degree": "degree",
}
"""Attribute of ``Settings`` that takes the value of a strategy's field, by the field's name."""
_WIRES = {"fp16_allreduce": "fp16", "bf16_allreduce": "bf16"}


UNSHARDED = (
    "sharding",
    "find_unused_parameters",
    "static_graph",
    "build_strategy.enable_backward_optimizer_op_deps",
    "build_strategy.enable_sequential_execution",
    *(field for called in ("fusion", "hierarchy", "communicators", "local steps") for field in CALLED[called]),
)
"""Names of the strategy fields that sharded training does not use, and of ``sharding`` itself."""


@dataclass(slots=True)
class Settings:
    """A strategy's changes as settings of PyTorch; None or empty: no change."""

    arguments: dict[str, object] = field(default_factory=dict)
    """Arguments of DistributedDataParallel, by name."""
    wire: str | None = None
    """Data type of DistributedDataParallel's compression hook: ``fp16`` or ``bf16``."""
    threads: int | None = None
    accumulate: int | None = None
    """Number of backward passes per update."""
    lr_scale: float | None = None
    reshards: bool | int | None = None
    """Value of ``reshard_after_forward`` in calls of ``fully_shard`` on blocks."""
    degree: int | None = None
    """Number of ranks per shard group of ``fully_shard``, which is the size of its mesh's last dimension."""
    policy: str = ""
    """Arguments of the ``MixedPrecisionPolicy`` for ``fully_shard``, as written in a call."""
    others: dict[str, object] = field(default_factory=dict)
    """Values of the changed fields for which PyTorch has no setting, by the field's name."""

    @property
    def spelled(self) -> list[str]:
        """The arguments of DistributedDataParallel, as written in a call."""
        return [f"{name}={value!r}" for name, value in self.arguments.items()]

    @property
    def shards(self) -> bool:
        """Whether any setting of ``fully_shard`` changes."""
        return self.reshards is not None or self.degree is not None or bool(self.policy)


def bucket_sizes_mb(experiment: Experiment, strategy: DistributedStrategy) -> tuple[float, ...]:
    """Return the sizes of the strategy's buckets in MiB, in order.

    Empty with parameter servers, sparse buckets, or buckets of several data types.
    """
    experiment = experiment.replace(strategy=strategy)
    table = table_for(experiment)
    buckets = build_plan(strategy, table.by_readiness(), setting_of(experiment, table)).buckets
    if strategy.mode != "collective" or len({bucket.dtype for bucket in buckets}) != 1 or any(bucket.sparse for bucket in buckets):
        return ()
    return tuple(bucket.nbytes / MIB for bucket in buckets)


def in_pytorch(strategy: DistributedStrategy, default: DistributedStrategy, buckets_mb: Sequence[float] = ()) -> Settings:
    """Return the changes from ``default`` to ``strategy`` as settings of PyTorch.

    ``buckets_mb``: sizes of the strategy's buckets, if DistributedDataParallel can use them.
    """
    found, (own, base) = Settings(), (dict(flat(encode(one))) for one in (strategy, default))
    told = _shard(found, strategy, default) if strategy.sharding else ()
    capped = strategy.fuse_all_reduce_ops and (strategy.fusion == "ddp" or (strategy.fusion == "fleet" and strategy.fuse_grad_count <= 1))
    laid_out = bool(buckets_mb) and strategy.fuses_by_cost and not strategy.is_local
    for name in [name for name in {**base, **own} if own.get(name) != base.get(name) and not name.startswith(told)]:
        if name in CALLED["fusion"] and laid_out:
            found.arguments["bucket_cap_mb_list"] = [*buckets_mb]
        elif name in ("fuse_grad_size_in_MB", "first_bucket_size_in_MB") and capped:
            found.arguments["bucket_cap_mb"] = strategy.fuse_grad_size_in_MB or _ALL_IN_ONE_MB
        elif name in ("find_unused_parameters", "static_graph", "broadcast_buffers"):
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
    """Set the settings of ``fully_shard`` in ``found``; return the prefixes of the fields that they express."""
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
    """Return ``reshard_after_forward`` for blocks: False for stages 1 and 2, in which parameters stay gathered."""
    configs = strategy.sharding_configs
    return configs.stage == 3 and configs.reshard_after_forward


def _policy(strategy: DistributedStrategy) -> dict[str, str]:
    """Return the arguments of ``MixedPrecisionPolicy``, by name.

    Without ``reduce_dtype``, PyTorch would reduce gradients in ``param_dtype``.
    """
    short = strategy.sharding_configs.param_dtype
    wire = "float16" if strategy.fp16_allreduce else "bfloat16" if strategy.bf16_allreduce else "" if short == "own" else "float32"
    return {name: dtype for name, dtype in (("param_dtype", short.replace("own", "")), ("reduce_dtype", wire)) if dtype}


def page_of(strategy: DistributedStrategy, default: DistributedStrategy, line: str, buckets_mb: Sequence[float] = ()) -> str:
    """Return the text of ``recommended.md``: how to use a strategy, with settings of PyTorch where it has them.

    ``buckets_mb``: see ``in_pytorch``.
    """
    import jinja2  # imported here because only this page needs it

    plain = in_pytorch(strategy, default, buckets_mb)
    environment = jinja2.Environment(  # noqa: S701  # Markdown, not HTML
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(resources.files("tuner").joinpath("recommended.md.jinja").read_text(encoding="utf-8"))
    others = ", ".join(f"`{name} = {_toml(value)}`" for name, value in plain.others.items())
    return template.render(plain=plain, strategy=strategy, default=default, line=line, others=others, libraries=_libraries(plain))


def in_words_of(library: Library, text: str) -> str:
    """Return a text in which calls of PyTorch are replaced by those of the library that wraps PyTorch."""

    def called(call: re.Match[str]) -> str:
        name, given = call.groups()
        if name == "fully_shard":
            return _SHARDING[library].format(given.rpartition("=")[2]) if library in _SHARDING else call[0]
        if library == "Trainer":
            prefix = "ddp_" if name == "DistributedDataParallel" else "dataloader_"
            return f"TrainingArguments(..., {prefix}{given.replace(', ', f', {prefix}')})"
        return _CALLS[library].format(given) if library in _CALLS and name != "DataLoader" else call[0]

    return _OF_PYTORCH.sub(called, text)


def _libraries(plain: Settings) -> dict[str, str]:
    """Return the call that makes the settings in each library that wraps the model, by the library's name."""
    if plain.shards:
        hsdp = f'ParallelismConfig(dp_replicate_size=int(os.environ["WORLD_SIZE"]) // {plain.degree}, dp_shard_size={plain.degree})'
        given: dict[str, str] = {} if plain.reshards is None else {name: text.format(plain.reshards) for name, text in _SHARDING.items()}
        if plain.degree:
            given = {"Accelerate": ", ".join([*filter(None, [given.get("Accelerate")]), f"Accelerator(..., parallelism_config={hsdp})"])}
        return given | {"Lightning": "ModelParallelStrategy(), whose module calls fully_shard in configure_model, as above"}
    wire, merge = plain.wire, plain.accumulate
    if not plain.arguments and wire is None and merge is None:
        return {}
    hooks = {name: [] if wire is None else [text.format(wire, wire.upper())] for name, text in _HOOKS.items()}
    handler, strategy = (", ".join([*plain.spelled, *hooks[name]]) for name in ("Accelerate", "Lightning"))
    merges = [] if merge is None else [f"gradient_accumulation_steps={merge}"]
    lightning = [f"strategy=DDPStrategy({strategy})"] if strategy else []
    lightning += [] if merge is None else [f"accumulate_grad_batches={merge}"]
    found = {"Lightning": f"Trainer({', '.join(lightning)})"}
    if "bucket_cap_mb_list" in plain.arguments:  # Trainer and Accelerate have no argument for it
        return found
    accelerator = [*([f"kwargs_handlers=[DistributedDataParallelKwargs({handler})]"] if handler else []), *merges]
    found = {"Accelerate": f"Accelerator({', '.join(accelerator)})"} | found
    trainer = [*(f"ddp_{text}" for text in plain.spelled), *merges]
    return found if wire else {"Hugging Face Trainer": f"TrainingArguments({', '.join(trainer)})"} | found


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
