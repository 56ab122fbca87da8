"""DistributedStrategy: every strategy of Paddle Fleet as one value.

Fields have Fleet's names and defaults where those describe what happens. The few fields with a name of our
own accept Fleet's name as an alias. Fleet's fields without an equivalent are accepted on reading and reported
as having no effect (``fleetbench.fleet_names``). Each executor decides which fields it can execute: see
``fleetbench.support``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import tomli_w

from fleetbench.config import Config, at_least, decode, defaults_of, encode
from fleetbench.digests import read_text, read_toml, write_whole
from fleetbench.errors import ConfigError
from fleetbench.exclusions import exclusions
from fleetbench.fleet_names import translate
from fleetbench.knobs import Knob
from fleetbench.sharding_configs import ShardingConfigs

SCHEMA = 1
_NOT_TOML = 'a strategy file holds lines such as "nccl_comm_num = 2"'
_NO_STRATEGY = "a single line [strategy] stands for the defaults"
_TABLES = ("localsgd", "adaptive_localsgd", "gradient_merge", "amp", "recompute", "a_sync", "sharding")
_READ_WITH: tuple[tuple[str, tuple[object, ...], tuple[str, ...]], ...] = (
    ("fuse_all_reduce_ops", (True,), ("fusion", "fuse_grad_size_in_MB", "fuse_grad_count")),
    ("fusion", ("fleet", "ddp"), ("fuse_grad_size_in_MB",)),
    ("fusion", ("fleet",), ("fuse_grad_count",)),
    ("fusion", ("ddp",), ("first_bucket_size_in_MB",)),
    ("fusion", ("by_number",), ("fuse_grad_size_in_num", "last_comm_group_size_MB")),
    ("use_hierarchical_allreduce", (True,), ("hierarchical_inner_ranks", "hierarchical_variant")),
    *((switch, (True,), (f"{switch}_configs",)) for switch in _TABLES),
    ("sharding", (False,), ("fuse_all_reduce_ops", "fuse_grad_size_in_MB", "fuse_grad_count")),
)
"""Rows of (name of a field, its values with which other fields have an effect, names of those fields)."""
_NEEDED = tuple((switch, on, name) for switch, on, names in _READ_WITH for name in names)
MOST_COMMUNICATORS = 64
"""Largest ``nccl_comm_num``. Each communicator is a process group with its own connections on every trainer,
so thousands would exhaust the ports. Fleet advises 1 or 2."""

_CLOCK = Knob("plan clock")
_FUSION = Knob("plan clock", "fusion")
_HIERARCHY = Knob("plan virtual digits", "hierarchy")
_WIRE = Knob("plan virtual digits", "wire")
_COMMUNICATORS = Knob("plan clock", "communicators")
_COMPUTE = Knob("plan clock time")
_GRAPH = Knob("plan clock time restarts")
_LOWER = Knob("plan virtual way time restarts")
_LOCAL = Knob("plan virtual way", "local steps")
_UNTRAINED = Knob("plan way")
_MERGE = Knob("plan virtual way", "merged gradients")
_SHARDED = Knob("plan clock", "sharding")
_SERVED = Knob("servers way", "parameter servers' mode")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStrategy(Config):
    """Fleet's ``build_strategy``: op fusion and the order of operators."""

    fuse_all_optimizer_ops: bool = _COMPUTE(False)
    """Update all parameters with one fused kernel instead of one kernel per parameter."""
    fuse_elewise_add_act_ops: bool = False
    """Fuse element-wise additions with the activation after them."""
    fuse_bn_act_ops: bool = False
    """Fuse batch normalisation with the activation after it."""
    fuse_relu_depthwise_conv: bool = False
    """Fuse a ReLU with the depthwise convolution after it."""
    enable_backward_optimizer_op_deps: bool = Knob("plan clock", "update by bucket")(True, "update_by_bucket", (False, True), "loop")
    """Whether the update waits for the whole backward. If false, the parameters of a bucket are updated as soon
    as the bucket has been exchanged."""
    enable_sequential_execution: bool = _CLOCK(False)
    """For debugging: use deterministic algorithms, and execute operations in order, without overlap."""
    compile_split: Literal["block", "bucket"] = _COMPUTE("block")
    """No effect: op fusion compiles each block separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging(Config):
    """State that trainers average besides parameters under local steps."""

    momentum: Literal["local", "reset", "average"] = "local"
    """Treatment of the momentum buffers (Adam's ``exp_avg``) when trainers average; other optimizer state is
    left as it is."""
    buffers: Literal["local", "average"] = "local"
    """Treatment of batch-norm statistics when trainers average."""
    optimizer_state: Literal["local", "average"] = "local"
    """``average`` also averages the optimizer's state. It allows optimizers for which an average of steps is
    not a step of averages (Adam, Adagrad) at ``k_steps = 1``."""
    outer_lr: float = 1.0
    """Learning rate of the outer optimizer (DiLoCo, arXiv 2311.08105). Its gradient is the averaged
    difference of a round."""
    outer_momentum: float = 0.0
    """Momentum of the outer optimizer. If this and ``outer_lr`` have their defaults, trainers average
    instead."""
    outer_nesterov: bool = True
    """Use Nesterov momentum, as in ``torch.optim.SGD(nesterov=True)``."""

    def _validate(self) -> None:
        at_least(self, 0, "outer_lr", above=True)
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError("must be at least 0 and below 1", "outer_momentum", repr(self.outer_momentum), "DiLoCo's is 0.9")

    def shared(self) -> dict[str, Any]:
        """Return the values of the fields that fixed and adaptive local steps have in common, by name."""
        return {name: getattr(self, name) for name in defaults_of(Averaging)}

    @property
    def has_outer(self) -> bool:
        """Whether a round ends with a step of an outer optimizer rather than with plain averaging."""
        return self.outer_lr != 1 or self.outer_momentum != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGDConfigs(Averaging):
    """``localsgd_configs``: when trainers synchronise, and what they average."""

    k_steps: int = _LOCAL(1, "local_steps", (1, 2, 4, 8, 16), "target")
    """Number of local steps per round, K."""
    begin_step: int = 1
    """``fleet``: trainers synchronise at every step up to this one (counted from 1). With an outer optimizer,
    the default 1 means no such steps, so that the first round is whole. ``torch``: first step that
    synchronises."""
    schedule: Literal["fleet", "document", "torch"] = "fleet"
    """Published schedule by which trainers synchronise: see ``fleetbench.plan.local_sgd``."""
    warmup_epochs: int = 0
    """Number of epochs with K = 1 at the start of the ``document`` schedule (Fleet's
    ``local_sgd_is_warm_steps``)."""
    warmup: Literal["exp", "const", "linear"] = "exp"
    """How K grows in the ``document`` schedule after its warm-up."""
    fragments: int = 1
    """Number of fragments of the model. One fragment is exchanged every ``k_steps / fragments`` updates
    (Streaming DiLoCo, arXiv 2501.18512)."""
    overlap_steps: int = 0
    """Number of updates that overlap the exchange of a fragment. A trainer takes its difference that many
    updates before it merges the average."""
    mixing: float = 0.0
    """Weight of a trainer's own values when a fragment is merged, from 0 to 1."""
    worker_trainers: int = 1
    """Number of trainers per worker, consecutive ranks such as those of a site. They average gradients in every
    update, and workers average parameters every K updates."""
    outer_wire: Literal["fp32", "int8"] = _UNTRAINED("fp32")
    """Format in which differences are sent: FP32, or blocks of 8-bit integers with one scale each."""
    outer_error_feedback: bool = _UNTRAINED(False)
    """Add the quantisation error of a trainer's difference to its next difference (arXiv 1901.09847)."""
    outer_on_host: bool = _CLOCK(False)
    """Keep the agreed parameters and the outer momentum in pinned host memory instead of on the GPU."""
    elastic: bool = False
    """Let workers leave and join between rounds, and die within one: a round's average is over those that arrive,
    weighted by their local steps."""
    elastic_lr: Literal["constant", "sqrt", "linear"] = "constant"
    """Factor on the inner learning rate when n of N workers are there: 1, the square root of n / N, or n / N. N is
    the number of workers that the launch starts."""

    def _validate(self) -> None:
        Averaging._validate(self)  # noqa: SLF001  # slotted dataclasses are made anew, which super() without arguments does not survive
        at_least(self, 1, "k_steps", "begin_step", "fragments", "worker_trainers")
        at_least(self, 0, "warmup_epochs", "overlap_steps")
        at_least(self, 0, "mixing", most=1)
        self._refuse_fragments()
        if self.elastic_lr != "constant" and not self.elastic:
            raise ConfigError("is set while elastic is off", "elastic_lr", repr(self.elastic_lr), "add elastic = true, or drop elastic_lr")
        unread = {"begin_step": 1} if self.schedule == "document" else {"warmup_epochs": 0, "warmup": "exp"}
        for name, default in unread.items():
            if getattr(self, name) != default:
                hint = f"drop {name}, or " + ("use warmup_epochs" if self.schedule == "document" else 'set schedule = "document"')
                raise ConfigError(f'schedule = "{self.schedule}" does not read it', name, repr(getattr(self, name)), hint)

    @property
    def has_fragments(self) -> bool:
        """Whether fragments of the model have their own rounds, or an exchange overlaps later steps."""
        return self.fragments > 1 or self.overlap_steps > 0 or self.mixing > 0

    def _refuse_fragments(self) -> None:
        """Raise ``ConfigError`` if the rounds of fragments do not fit ``k_steps``."""
        k, parts = self.k_steps, self.fragments
        if k < parts or k % parts:
            hint = f"k_steps = {-(-k // parts) * parts} gives each fragment {-(-k // parts)} updates"
            raise ConfigError(f"must be a multiple of the {parts} fragments", "k_steps", repr(k), hint)
        if self.overlap_steps >= k // parts:
            hint = f"at most {k // parts - 1}, or raise k_steps"
            what = f"must be less than the {k // parts} updates between two merges (k_steps / fragments)"
            raise ConfigError(what, "overlap_steps", repr(self.overlap_steps), hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveLocalSGDConfigs(Averaging):
    """``adaptive_localsgd_configs``: K follows the loss and the learning rate."""

    init_k_steps: int = 1
    """K of the first round, K0."""
    begin_step: int = 1
    """Trainers synchronise at every step up to this one (counted from 1). With an outer optimizer, the
    default 1 means no such steps, so that the first round is whole."""
    variant: Literal["fleet", "paper", "document", "qsr"] = "fleet"
    """Rule for K: Fleet's clamp, AdaComm, the older document's rule, or the quadratic synchronisation rule
    (``qsr``)."""
    alpha: float = 0.01
    """``qsr``: alpha in K = max(K0, floor((alpha / lr)^2))."""

    def _validate(self) -> None:
        Averaging._validate(self)  # noqa: SLF001  # as in LocalSGDConfigs
        at_least(self, 1, "init_k_steps", "begin_step")
        at_least(self, 0, "alpha", above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMergeConfigs(Config):
    """``gradient_merge_configs``: accumulate k micro-batches, then communicate and update once."""

    k_steps: int = 1
    """Number of micro-batches per update."""
    avg: bool = True
    """Divide the sum of gradients by ``k_steps``."""
    remainder: Literal["carry", "flush", "drop"] = "carry"
    """Treatment of an unfinished accumulation at the end of an epoch; Fleet carries it over."""
    lr_per: Literal["micro_batch", "update"] = "micro_batch"
    """Unit that the learning-rate schedule counts; Fleet counts micro-batches."""
    batch_norm_per: Literal["micro_batch", "update"] = "micro_batch"
    """How often batch-norm statistics are updated; Fleet updates them with every micro-batch."""

    def _validate(self) -> None:
        at_least(self, 1, "k_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpConfigs(Config):
    """``amp_configs``: mixed precision and dynamic loss scaling, with Fleet's settings."""

    init_loss_scaling: float = 32768.0
    """Loss scale of the first update."""
    incr_every_n_steps: int = 1000
    """Number of updates in a row without overflow after which the scale grows."""
    decr_every_n_nan_or_inf: int = 2
    """Number of updates in a row with overflow after which the scale shrinks."""
    incr_ratio: float = 2.0
    """Factor by which the scale grows."""
    decr_ratio: float = 0.8
    """Factor by which the scale shrinks."""
    use_dynamic_loss_scaling: bool = True
    """Adjust the scale. If false, it stays at ``init_loss_scaling``; an overflow still skips the update."""
    dtype: Literal["fp16", "bf16"] = _LOWER("fp16")
    """Type of the lower precision in the forward pass."""

    def _validate(self) -> None:
        at_least(self, 1, "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio")
        at_least(self, 0, "init_loss_scaling", above=True)
        at_least(self, 0, "decr_ratio", most=1, above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfigs(Config):
    """``recompute_configs``: which activations are recomputed in the backward."""

    checkpoints: tuple[str, ...] = ()
    """Names of submodules whose activations are dropped after the forward and recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ASyncConfigs(Config):
    """``a_sync_configs``: the asynchronous parameter server and GeoSGD."""

    k_steps: int = -1
    """Mode. 0: asynchronous. Above 0: GeoSGD with at most ``k_steps`` steps between exchanges. -1: GeoSGD if the
    optimizer is SGD and memory suffices, otherwise asynchronous."""
    max_merge_var_num: int = 1
    """Asynchronous: number of gradients that are summed into one push; fewer if the trainer is idle."""
    send_queue_size: int = 16
    """Asynchronous: number of gradients that may wait for the trainer's sender before the trainer itself has
    to wait."""
    independent_recv_thread: bool = False
    """Asynchronous: pull in parallel with pushes, instead of alternating with them."""
    min_send_grad_num_before_recv: int = 1
    """Asynchronous: number of gradients that are sent between two pulls of dense parameters."""
    thread_pool_size: int = 1
    """Asynchronous: number of pushes that may be unacknowledged at once."""
    send_wait_times: int = 1
    """Number of pauses of 10 ms without a step after which a trainer counts as idle and sends everything in
    its queue."""
    runtime_split_send_recv: bool = Knob("way")(False)
    """No effect; true is refused."""
    launch_barrier: bool = True
    """Whether ``fleet.init_worker()`` waits for all trainers."""

    def _validate(self) -> None:
        at_least(self, -1, "k_steps")
        at_least(self, 1, "max_merge_var_num", "send_queue_size", "thread_pool_size", "send_wait_times", "min_send_grad_num_before_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedStrategy(Config):
    """How data-parallel trainers exchange gradients or parameters.

    An immutable value: ``replace`` returns a changed copy.

    Raises ``ConfigError`` for an unknown field, a wrong type, or fields that contradict each other.
    """

    mode: Literal["collective", "ps"] = Knob("servers way")("collective")
    """How trainers communicate: by collectives, or through parameter servers."""
    auto: bool = Knob("")(False)
    """Load the stored recommendation for this workload and cluster."""

    fuse_all_reduce_ops: bool = _FUSION(True)
    """Fuse gradients into buckets. If false, each gradient has its own all-reduce."""
    fuse_grad_size_in_MB: float = _FUSION(  # noqa: N815  # Fleet's name
        32.0, "fuse_grad_size_in_MB", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    )
    """Soft cap of a bucket in MiB (as in Fleet, despite the name); 0: one bucket for everything."""
    fuse_grad_count: int = _FUSION(50)
    """Soft cap on the number of gradients in a bucket; 0 or 1: no cap."""
    fusion: Literal["fleet", "ddp", "by_number", "merged_gradient", "optimal"] = _FUSION(
        "fleet", "fusion", ("merged_gradient", "optimal", "off")
    )
    """Rule that forms buckets: Fleet's soft caps, DistributedDataParallel's own buckets, Fleet's other pass
    (``by_number``), MG-WFBP's published rule (arXiv 1811.11141), or the partition that ends earliest on a
    ring."""
    first_bucket_size_in_MB: float = _FUSION(0.0)  # noqa: N815  # as Fleet's names of sizes
    """``ddp``: cap of the first bucket in MiB; 0: the cap of the other buckets. DistributedDataParallel uses
    1 if no ``bucket_cap_mb`` is given."""
    fuse_grad_size_in_num: int = _FUSION(8)
    """``by_number``: number of gradients per bucket and dtype."""
    last_comm_group_size_MB: float = _FUSION(1.0)  # noqa: N815  # Fleet's name
    """``by_number``: size of the small last bucket, in MiB."""

    use_hierarchical_allreduce: bool = _HIERARCHY(False, "hierarchy", ("off", "leader", "reduce_scatter"), "nodes")
    """All-reduce in a hierarchy: reduce inside each node, all-reduce between nodes, broadcast inside each
    node."""
    hierarchical_inner_ranks: int = _HIERARCHY(0)
    """Number of ranks per inner group; 0: the trainers of a node."""
    hierarchical_variant: Literal["leader", "reduce_scatter"] = _HIERARCHY("leader")
    """Reduction inside a node: to a ``leader``, as in Fleet, or by ``reduce_scatter``, which uses every link of
    the node."""
    fp16_allreduce: bool = _WIRE(False, "wire", ("fp32", "fp16", "bf16"), "rounding")
    """Send gradients as FP16."""
    bf16_allreduce: bool = _WIRE(False)
    """Send gradients as BF16."""
    nccl_comm_num: int = _COMMUNICATORS(1, "nccl_comm_num", (1, 2))
    """Number of communicators. Bucket i uses communicator i mod ``nccl_comm_num``."""
    sync_nccl_allreduce: bool = _COMMUNICATORS(True, "sync_nccl_allreduce", (True, False), "waiting")
    """Allow only one bucket in flight over all communicators. If false, each communicator carries as many
    buckets as its backend allows (``fleetbench.plan.groups``). Averages between workers of several trainers
    have a communicator of their own, beside that of gradients."""
    find_unused_parameters: bool = _CLOCK(False)
    """Handle parameters that a step's loss does not use, instead of refusing the step."""
    static_graph: bool = _CLOCK(False)
    """Every backward reaches the same parameters, each as often, as in the first one, whose buckets are
    exchanged at its end; some may be unused. DDP's ``static_graph``."""
    broadcast_buffers: bool = Knob("plan virtual digits")(True)
    """Rank 0 broadcasts its buffers after each exchange of gradients, as DDP does before the next forward.
    For local steps, ``buffers`` decides."""

    build_strategy: BuildStrategy = _GRAPH(BuildStrategy())
    """Op fusion and the order of operators."""
    thread_num: int = Knob("plan servers clock time", "threads")(1, "thread_num", (1, 2), "model")
    """Number of CPU threads per trainer (torch's intra-op threads)."""
    sync_batch_norm: bool = Knob("plan way time")(False)
    """Compute batch statistics over all trainers."""
    cudnn_exhaustive_search: bool = _COMPUTE(True)
    """Let cuDNN time its algorithms and use the fastest."""
    conv_workspace_size_limit: int = _COMPUTE(512)
    """Largest cuDNN workspace, in MiB."""
    fraction_of_gpu_memory_to_use: float | None = Knob("plan clock memory")(None)
    """Share of the device's memory that is reserved at the start."""
    fetch_every_n_steps: int = Knob("plan servers clock time")(1)
    """Number of steps between two reads of results from the device."""

    lr_scale: float = Knob("plan virtual servers way", "learning rate")(1.0)
    """Factor on the optimizer's learning rate in every update. With n times the samples per update, Goyal et
    al. (arXiv 1706.02677) take n."""
    amp: bool = _LOWER(False)
    """Compute the forward pass in a lower precision."""
    amp_configs: AmpConfigs = Knob("plan virtual way restarts")(AmpConfigs())
    """Settings of mixed precision and loss scaling."""
    recompute: bool = _GRAPH(False)
    """Recompute activations in the backward instead of storing them."""
    recompute_configs: RecomputeConfigs = _GRAPH(RecomputeConfigs())
    """Settings of activation recomputation."""

    localsgd: bool = _LOCAL(False)
    """Take local steps and average parameters every K steps (Local SGD)."""
    localsgd_configs: LocalSGDConfigs = _LOCAL(LocalSGDConfigs())
    """Settings of local steps with a fixed K."""
    adaptive_localsgd: bool = _LOCAL(False)
    """Take local steps, with a K that follows the loss and the learning rate."""
    adaptive_localsgd_configs: AdaptiveLocalSGDConfigs = _LOCAL(AdaptiveLocalSGDConfigs())
    """Settings of local steps with an adaptive K."""
    gradient_merge: bool = _MERGE(False)
    """Accumulate several micro-batches, then communicate and update once."""
    gradient_merge_configs: GradientMergeConfigs = _MERGE(GradientMergeConfigs())
    """Settings of gradient accumulation."""

    sharding: bool = _SHARDED._replace(says="plan clock restarts")(False)
    """Shard the optimizer's state, and optionally gradients and parameters, among trainers (ZeRO, FSDP)."""
    sharding_configs: ShardingConfigs = _SHARDED(ShardingConfigs())
    """Settings of sharded data parallelism."""

    a_sync: bool = _SERVED(False)
    """Train asynchronously with parameter servers; needs ``mode = "ps"``."""
    a_sync_configs: ASyncConfigs = _SERVED(ASyncConfigs())
    """Settings of asynchronous training and GeoSGD."""

    def _validate(self) -> None:
        at_least(
            self,
            0,
            "fuse_grad_size_in_MB",
            "fuse_grad_count",
            "first_bucket_size_in_MB",
            "hierarchical_inner_ranks",
            "last_comm_group_size_MB",
            "conv_workspace_size_limit",
        )
        at_least(self, 1, "fuse_grad_size_in_num", "thread_num", "fetch_every_n_steps")
        at_least(self, 1, "nccl_comm_num", most=MOST_COMMUNICATORS)
        at_least(self, 0, "fraction_of_gpu_memory_to_use", most=1, above=True)
        at_least(self, 0, "lr_scale", above=True)
        self._refuse_settings_of_what_is_off()
        self._refuse_contradictions()

    def _refuse_settings_of_what_is_off(self) -> None:
        defaults = defaults_of(type(self))  # type: ignore[arg-type]  # classes are hashable
        for switch, on, name in _NEEDED:
            value = getattr(self, name)
            if value != defaults[name] and getattr(self, switch) not in on:
                shown = None if isinstance(value, Config) else repr(value)
                off, wanted = (
                    ("off", "true") if on == (True,) else ("on", "false") if on == (False,) else (getattr(self, switch), f'"{on[0]}"')
                )
                raise ConfigError(f"is set while {switch} is {off}", name, shown, f"add {switch} = {wanted}, or drop {name}")

    def _refuse_contradictions(self) -> None:
        if self.sharding and self.sharding_configs.param_dtype != "own" and not (self.amp and self.amp_configs.dtype == "bf16"):
            where, value = "sharding_configs.param_dtype", repr(self.sharding_configs.param_dtype)
            raise ConfigError("is also the type of compute", where, value, 'set amp = true and amp_configs.dtype = "bf16" with it')
        for both, one, other, reason in exclusions(self):
            if both:
                where = one.replace("Local SGD", "adaptive_localsgd" if self.adaptive_localsgd else "localsgd")
                raise ConfigError(f"{one} and {other} exclude each other: {reason}", where, hint="keep one of them")

    @classmethod
    def translate(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Translate Fleet's older or misleading names into the current fields."""
        return translate(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DistributedStrategy:
        """Decode plain TOML data, which may use Fleet's names."""
        return decode(data, cls, "strategy")

    @classmethod
    def load(cls, path: str | Path) -> DistributedStrategy:
        """Read a strategy file such as ``recommended.toml`` (a ``[strategy]`` table, or its keys).

        From an experiment file it reads ``[strategy]``. Raises ``ConfigError``, which names the file, if the
        file cannot be read or holds no strategy.
        """
        return cls.parse(read_text(path, "fleetbench tune writes recommended.toml"), str(path))

    @classmethod
    def parse(cls, text: str, path: str) -> DistributedStrategy:
        """Return the strategy in ``text``; ``path`` names it in errors. Raises ``ConfigError`` like ``load``."""
        data = read_toml(text, path, _NOT_TOML)
        if not data:
            raise ConfigError("holds no strategy", path, hint=_NO_STRATEGY)
        schema = data.pop("schema", SCHEMA)
        if schema != SCHEMA:
            raise ConfigError("not a schema of this version", f"{path}: schema", repr(schema), f"this version reads schema {SCHEMA}")
        if _EXPERIMENT & data.keys() and ("strategy" not in data or data.keys() - _EXPERIMENT):
            raise ConfigError("needs [strategy], and no keys outside of tables", path, ", ".join(data), _NO_STRATEGY)
        return decode(data.get("strategy", data), cls, f"{path}: strategy")

    def save(self, path: str | Path, *comments: str) -> None:
        """Write a ``[strategy]`` table of the fields that differ from the defaults.

        One line per comment comes first.
        """
        header = "".join(f"# {line}\n" for line in comments)
        write_whole(Path(path), header + tomli_w.dumps({"schema": SCHEMA, "strategy": self.changes()}))

    def changes(self, base: DistributedStrategy | None = None) -> dict[str, Any]:
        """Return the fields that differ from ``base`` (default: Fleet's defaults), as plain TOML data."""
        return difference(encode(self), encode(base or DistributedStrategy()))

    def replace(self, **changes: Any) -> DistributedStrategy:
        """Return a copy with some fields changed.

        A ``*_configs`` may be given as a table, of which only the given keys change. Raises ``ConfigError``
        for an unknown field.
        """
        translated = self.translate(changes)
        for name, value in translated.items():
            if isinstance(value, Mapping) and isinstance(getattr(self, name, None), Config):
                translated[name] = {**encode(getattr(self, name)), **value}
        return dataclasses.replace(self, **translated)

    def without(self, *names: str) -> DistributedStrategy:
        """Return a copy with the fields of these dotted names, and fields that then have no effect, at defaults."""
        plain, reset = DistributedStrategy(), dict[str, dict[str, Any]]()
        for name in (name.removeprefix("strategy.") for name in names):
            table, _, key = name.rpartition(".")
            reset.setdefault(table, {})[key] = attrgetter(name)(plain)
        values = reset.pop("", {}) | {table: dataclasses.replace(getattr(self, table), **keys) for table, keys in reset.items()}
        values |= {name: getattr(plain, name) for switch, on, name in _NEEDED if values.get(switch, getattr(self, switch)) not in on}
        return dataclasses.replace(self, **values)

    @property
    def scales_loss(self) -> bool:
        """Whether losses are scaled against underflow. FP16 needs it and BF16 does not."""
        return self.amp and self.amp_configs.dtype == "fp16"

    @property
    def fuses_by_cost(self) -> bool:
        """Whether buckets depend on the cost of an all-reduce and on when gradients are ready."""
        return self.fusion in ("merged_gradient", "optimal")

    @property
    def is_local(self) -> bool:
        """Whether trainers take local steps and average parameters, with a fixed or an adaptive K."""
        return self.localsgd or self.adaptive_localsgd

    @property
    def is_elastic(self) -> bool:
        """Whether workers with local steps may come and go."""
        return self.localsgd and self.localsgd_configs.elastic

    @property
    def averaging(self) -> Averaging:
        """Settings in use of the state that trainers with local steps average besides parameters."""
        return self.adaptive_localsgd_configs if self.adaptive_localsgd else self.localsgd_configs

    @property
    def has_outer(self) -> bool:
        """Whether rounds end with a step of an outer optimizer, or fragments have their own rounds."""
        return (self.is_local and self.averaging.has_outer) or (self.localsgd and self.localsgd_configs.has_fragments)

    @property
    def quantises(self) -> bool:
        """Whether differences are sent as INT8."""
        return self.localsgd and self.localsgd_configs.outer_wire == "int8"

    @property
    def worker_trainers(self) -> int:
        """Number of trainers that average gradients in every update and average parameters as one worker."""
        return self.localsgd_configs.worker_trainers if self.localsgd else 1

    @property
    def needs_linear_optimizer(self) -> bool:
        """Whether trainers average parameters after every update, but no optimizer state.

        This equals averaging gradients only for ``LINEAR_OPTIMIZERS``.
        """
        every = self.localsgd and self.localsgd_configs.k_steps == 1
        return every and not self.has_outer and self.averaging.optimizer_state != "average"

    @property
    def follows_loss(self) -> bool:
        """Whether decisions of the strategy depend on the loss."""
        return self.adaptive_localsgd and self.adaptive_localsgd_configs.variant != "qsr"

    @property
    def averages_state(self) -> bool:
        """Whether trainers with local steps average their optimizers' state."""
        return self.is_local and (self.averaging.momentum == "average" or self.averaging.optimizer_state == "average")

    @property
    def local_steps(self) -> int:
        """K of a fixed Local SGD schedule; 1 if trainers synchronise at every step."""
        return self.localsgd_configs.k_steps if self.localsgd else 1


_EXPERIMENT = frozenset({"name", "strategy", "workload", "cluster", "tune", "run"})
"""Keys that the top level of an experiment file may hold."""


def difference(data: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items of ``data`` that differ from those of ``base``, also inside tables."""
    changed: dict[str, Any] = {}
    for key, value in data.items():
        if key in base and value == base[key]:
            continue
        nested = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        changed[key] = difference(value, base[key]) if nested else value
    return changed
