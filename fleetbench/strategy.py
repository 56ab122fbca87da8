"""DistributedStrategy: every strategy of Paddle Fleet as one value.

Fields carry Fleet's names and Fleet's defaults where those say what happens; the few with a name
of our own read Fleet's as an alias, and Fleet's fields without an equivalent here are accepted on
reading and reported as having no effect (``fleetbench.fleet_names``). Whether a field can be
executed is the executor's to say: see ``fleetbench.support``.
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
from fleetbench.digests import read_text, read_toml, sealed, write_whole
from fleetbench.errors import ConfigError
from fleetbench.fleet_names import translate
from fleetbench.knobs import Knob
from fleetbench.sharding_configs import ShardingConfigs

SCHEMA = 1
_NOT_TOML = 'a strategy file holds lines such as "nccl_comm_num = 2"'
_NO_STRATEGY = "a line [strategy] alone stands for the defaults"
_TABLES = ("localsgd", "adaptive_localsgd", "gradient_merge", "amp", "recompute", "a_sync", "sharding")
_READ_WITH: tuple[tuple[str, tuple[object, ...], tuple[str, ...]], ...] = (
    ("fuse_all_reduce_ops", (True,), ("fusion", "fuse_grad_size_in_MB", "fuse_grad_count")),
    ("fusion", ("fleet", "ddp"), ("fuse_grad_size_in_MB",)),
    ("fusion", ("fleet",), ("fuse_grad_count",)),
    ("fusion", ("ddp",), ("first_bucket_size_in_MB",)),
    ("fusion", ("by_number",), ("fuse_grad_size_in_num", "last_comm_group_size_MB")),
    ("use_hierarchical_allreduce", (True,), ("hierarchical_inner_ranks", "hierarchical_variant")),
    *((switch, (True,), (f"{switch}_configs",)) for switch in _TABLES),
    ("mode", ("ps",), ("overlap_push", "reduce_in_node")),
    ("sharding", (False,), ("fuse_all_reduce_ops", "fuse_grad_size_in_MB", "fuse_grad_count")),
)
"""A field, the values with which others are read, and these."""
_NEEDED = tuple((switch, on, name) for switch, on, names in _READ_WITH for name in names)
MOST_COMMUNICATORS = 64
"""Each is a process group with connections of its own on every trainer, so that thousands exhaust ports; Fleet advises 1 or 2."""

_CLOCK = Knob("plan clock")
_FUSION = Knob("plan clock", "fusion")
_PIECES = Knob("plan pieces clock", "fusion")
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
_SIMULATED = Knob("simulated clock")


def check_hierarchy(trainers: int, inner: int) -> None:
    """Raise ``ConfigError`` where the world does not divide by ``inner`` ranks a node, or nothing is left to do in a hierarchy."""
    if inner < 2 or trainers % inner:
        what = f"does not divide the world of {trainers} trainers into groups of at least 2"
        hint = f"choose a number above 1 that divides the {trainers} trainers, or switch use_hierarchical_allreduce off"
        raise ConfigError(what, "strategy.hierarchical_inner_ranks", repr(inner), hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStrategy(Config):
    """Fleet's ``build_strategy``: op fusion and the order of operators."""

    fuse_all_optimizer_ops: bool = _COMPUTE(False)
    """One fused update instead of one kernel a parameter."""
    fuse_elewise_add_act_ops: bool = False
    """Fuse element-wise additions with the activation after them."""
    fuse_bn_act_ops: bool = False
    """Fuse batch normalisation with the activation after it."""
    fuse_relu_depthwise_conv: bool = False
    """Fuse a ReLU with the depthwise convolution after it."""
    enable_backward_optimizer_op_deps: bool = Knob("plan clock", "update by bucket")(True, "update_by_bucket", (False, True), "loop")
    """The update waits for the whole backward; off: a bucket's parameters update as it arrives."""
    enable_sequential_execution: bool = _CLOCK(False)
    """Deterministic algorithms in definition order, for debugging."""
    compile_split: Literal["block", "bucket"] = _COMPUTE("block")
    """No effect: op fusion compiles each block for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging(Config):
    """What trainers that update alone average besides parameters."""

    momentum: Literal["local", "reset", "average"] = "local"
    """What happens to the momentum buffers (Adam's ``exp_avg``) at an averaging; other state of the optimizer stays."""
    buffers: Literal["local", "average"] = "local"
    """What happens to batch-norm statistics at an averaging."""
    optimizer_state: Literal["local", "average"] = "local"
    """``average`` allows optimizers whose average of steps is not a step of averages (Adam, Adagrad) at ``k_steps = 1``."""
    outer_lr: float = 1.0
    """Learning rate of the outer optimizer (DiLoCo, arXiv 2311.08105), whose gradient is the averaged difference of a round."""
    outer_momentum: float = 0.0
    """Momentum of the outer optimizer; with this and ``outer_lr`` at their defaults, trainers average."""
    outer_nesterov: bool = True
    """Nesterov's momentum, as in ``torch.optim.SGD(nesterov=True)``."""

    def _validate(self) -> None:
        at_least(self, 0, "outer_lr", above=True)
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError("must be at least 0 and below 1", "outer_momentum", repr(self.outer_momentum), "DiLoCo's is 0.9")

    def shared(self) -> dict[str, Any]:
        """Values of the fields that both kinds of local steps have, by name."""
        return {name: getattr(self, name) for name in defaults_of(Averaging)}

    @property
    def has_outer(self) -> bool:
        """Whether a round ends with a step of an outer optimizer, rather than with an averaging alone."""
        return self.outer_lr != 1 or self.outer_momentum != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSGDConfigs(Averaging):
    """``localsgd_configs``: when trainers meet, and what they average."""

    k_steps: int = _LOCAL(1, "local_steps", (1, 2, 4, 8, 16), "target")
    """Local steps of a round, K."""
    begin_step: int = 1
    """``fleet``: up to this step (counted from 1) every step synchronises; at 1 none does with an outer optimizer, whose rounds are whole.
    ``torch``: the first step that does."""
    schedule: Literal["fleet", "document", "torch"] = "fleet"
    """Which published schedule counts the steps: see ``fleetbench.plan.local_sgd``."""
    warmup_epochs: int = 0
    """Epochs before the ``document`` schedule starts (Fleet's ``local_sgd_is_warm_steps``)."""
    warmup: Literal["exp", "const", "linear"] = "exp"
    """How the ``document`` schedule grows K after its warm-up."""
    fragments: int = 1
    """Parts of the model, of which one is exchanged every ``k_steps / fragments`` updates (Streaming DiLoCo, arXiv 2501.18512)."""
    overlap_steps: int = 0
    """Updates that the exchange of a fragment has beside it; the difference is taken that many updates before it is merged."""
    mixing: float = 0.0
    """Share of a trainer's own values that a merge of a fragment keeps."""
    outer_wire: Literal["fp32", "int8"] = _UNTRAINED("fp32")
    """How differences travel: as they are, or in blocks of 8-bit integers with a scale each."""
    outer_error_feedback: bool = _UNTRAINED(False)
    """What quantising takes from a trainer's difference is added to its next one (arXiv 1901.09847)."""
    outer_on_host: bool = _CLOCK(False)
    """What trainers agreed on and the outer momentum lie in the host's memory, pinned, and not on the GPU."""

    def _validate(self) -> None:
        Averaging._validate(self)  # noqa: SLF001  # slotted dataclasses are made anew, which super() without arguments does not survive
        at_least(self, 1, "k_steps", "begin_step", "fragments")
        at_least(self, 0, "warmup_epochs", "overlap_steps")
        at_least(self, 0, "mixing", most=1)
        self._refuse_fragments()
        unread = {"begin_step": 1} if self.schedule == "document" else {"warmup_epochs": 0, "warmup": "exp"}
        for name, default in unread.items():
            if getattr(self, name) != default:
                hint = f"drop {name}, or " + ("use warmup_epochs" if self.schedule == "document" else 'set schedule = "document"')
                raise ConfigError(f'schedule = "{self.schedule}" does not read it', name, repr(getattr(self, name)), hint)

    @property
    def has_fragments(self) -> bool:
        """Whether parts of the model take rounds of their own, or a round's exchange goes on beside later steps."""
        return self.fragments > 1 or self.overlap_steps > 0 or self.mixing > 0

    def _refuse_fragments(self) -> None:
        """Raise ``ConfigError`` where rounds of fragments do not come out even."""
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
    """Up to this step (counted from 1) every step synchronises; at 1 none does with an outer optimizer, whose rounds are whole."""
    variant: Literal["fleet", "paper", "document", "qsr"] = "fleet"
    """Fleet's clamp, AdaComm's, the older document's, or the quadratic synchronisation rule."""
    alpha: float = 0.01
    """``qsr``: K = max(K0, floor((alpha / lr)^2))."""

    def _validate(self) -> None:
        Averaging._validate(self)  # noqa: SLF001  # as in LocalSGDConfigs
        at_least(self, 1, "init_k_steps", "begin_step")
        at_least(self, 0, "alpha", above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientMergeConfigs(Config):
    """``gradient_merge_configs``: accumulate k micro-batches, then communicate and update once."""

    k_steps: int = 1
    """Micro-batches of one update."""
    avg: bool = True
    """Divide the sum by ``k_steps``."""
    remainder: Literal["carry", "flush", "drop"] = "carry"
    """What happens to a started accumulation when the epoch ends; Fleet carries."""
    lr_per: Literal["micro_batch", "update"] = "micro_batch"
    """What the learning-rate schedule counts; Fleet counts micro-batches."""
    batch_norm_per: Literal["micro_batch", "update"] = "micro_batch"
    """How often batch-norm statistics move; in Fleet with every micro-batch."""

    def _validate(self) -> None:
        at_least(self, 1, "k_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpConfigs(Config):
    """``amp_configs``: dynamic loss scaling with Fleet's knobs."""

    init_loss_scaling: float = 32768.0
    incr_every_n_steps: int = 1000
    decr_every_n_nan_or_inf: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.8
    use_dynamic_loss_scaling: bool = True
    dtype: Literal["fp16", "bf16"] = _LOWER("fp16")
    """The lower precision of the forward pass."""

    def _validate(self) -> None:
        at_least(self, 1, "incr_every_n_steps", "decr_every_n_nan_or_inf", "incr_ratio")
        at_least(self, 0, "init_loss_scaling", above=True)
        at_least(self, 0, "decr_ratio", most=1, above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeConfigs(Config):
    """``recompute_configs``: which activations are recomputed in the backward."""

    checkpoints: tuple[str, ...] = ()
    """Names of submodules whose activations are dropped and recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ASyncConfigs(Config):
    """``a_sync_configs``: the asynchronous parameter server and GeoSGD."""

    k_steps: int = -1
    """0: asynchronous; above 0: GeoSGD with at most so many steps between exchanges; -1: chosen."""
    max_merge_var_num: int = 1
    send_queue_size: int = 16
    independent_recv_thread: bool = False
    min_send_grad_num_before_recv: int = 1
    thread_pool_size: int = 1
    send_wait_times: int = 1
    runtime_split_send_recv: bool = Knob("way")(False)
    launch_barrier: bool = True

    def _validate(self) -> None:
        at_least(self, -1, "k_steps")
        at_least(self, 1, "max_merge_var_num", "send_queue_size", "thread_pool_size", "send_wait_times", "min_send_grad_num_before_recv")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedStrategy(Config):
    """How data-parallel trainers exchange what they learn. A value: ``replace`` makes another.

    Raises ``ConfigError`` for an unknown field, a wrong type, or fields that contradict each other.
    """

    mode: Literal["collective", "ps"] = Knob("servers way")("collective")
    """Collectives among trainers, or parameter servers."""
    auto: bool = Knob("")(False)
    """Load the stored recommendation for this workload and cluster."""

    fuse_all_reduce_ops: bool = _PIECES(True)
    """Fuse gradients into buckets; off: one all-reduce a gradient."""
    fuse_grad_size_in_MB: float = _PIECES(  # noqa: N815  # Fleet's name
        32.0, "fuse_grad_size_in_MB", (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    )
    """Soft cap of a bucket in MiB (as in Fleet, whatever the name says); 0: one bucket of all."""
    fuse_grad_count: int = _PIECES(50)
    """Soft cap of a bucket in gradients; 0 and 1: no cap."""
    fusion: Literal["fleet", "ddp", "by_number", "merged_gradient", "optimal"] = _FUSION(
        "fleet", "fusion", ("merged_gradient", "optimal", "off")
    )
    """Fleet's soft caps, DistributedDataParallel's own buckets, Fleet's other pass, MG-WFBP's published rule (arXiv 1811.11141), or the
    partition that ends earliest on a ring."""
    first_bucket_size_in_MB: float = _FUSION(0.0)  # noqa: N815  # as Fleet's names of sizes
    """``ddp``: cap of the first bucket in MiB; 0: that of the others. DistributedDataParallel's is 1 where it is given none."""
    fuse_grad_size_in_num: int = _FUSION(8)
    """``by_number``: gradients of a bucket and dtype."""
    last_comm_group_size_MB: float = _FUSION(1.0)  # noqa: N815  # Fleet's name
    """``by_number``: size in MiB of the small last bucket."""

    use_hierarchical_allreduce: bool = _HIERARCHY(False, "hierarchy", ("off", "leader", "reduce_scatter"), "nodes")
    """Reduce inside the node, all-reduce between nodes, broadcast inside the node."""
    hierarchical_inner_ranks: int = _HIERARCHY(0)
    """Ranks of the inner group; 0: the trainers of a node."""
    hierarchical_variant: Literal["leader", "reduce_scatter"] = _HIERARCHY("leader")
    """Fleet's leaders, or a reduce-scatter that uses every link of the node."""
    fp16_allreduce: bool = _WIRE(False, "wire", ("fp32", "fp16", "bf16"), "rounding")
    """Gradients travel as FP16."""
    bf16_allreduce: bool = _WIRE(False)
    """Gradients travel as BF16."""
    nccl_comm_num: int = _COMMUNICATORS(1, "nccl_comm_num", (1, 2))
    """Communicators; bucket i travels on communicator i mod ``nccl_comm_num``."""
    sync_nccl_allreduce: bool = _COMMUNICATORS(True, "sync_nccl_allreduce", (True, False), "waiting")
    """One bucket in flight over all communicators; off: on each as many as its backend carries (``fleetbench.plan.groups``)."""
    find_unused_parameters: bool = _CLOCK(False)
    """Handle parameters that a step's loss does not reach, instead of refusing the step."""
    broadcast_buffers: bool = Knob("plan virtual digits")(True)
    """After each exchange of gradients rank 0 sends its buffers, which DDP does before the next forward; local steps have ``buffers``."""

    build_strategy: BuildStrategy = _GRAPH(BuildStrategy())
    thread_num: int = Knob("plan servers clock time", "threads")(1, "thread_num", (1, 2), "model")
    """CPU threads of a trainer (torch's intra-op threads)."""
    sync_batch_norm: bool = Knob("plan way time")(False)
    """Batch statistics over all trainers."""
    cudnn_exhaustive_search: bool = _COMPUTE(True)
    """Let cuDNN time its algorithms."""
    conv_workspace_size_limit: int = _COMPUTE(512)
    """MiB of workspace cuDNN may take."""
    fraction_of_gpu_memory_to_use: float | None = Knob("plan clock memory")(None)
    """Memory taken ahead, as a share of the device."""
    fetch_every_n_steps: int = Knob("plan servers clock time")(1)
    """Read results back from the device every so many steps."""

    lr_scale: float = Knob("plan virtual servers way", "learning rate")(1.0)
    """Every update takes the optimizer's learning rate times this; as much as there are more samples in Goyal et al. (arXiv 1706.02677)."""
    amp: bool = _LOWER(False)
    amp_configs: AmpConfigs = Knob("plan virtual way restarts")(AmpConfigs())
    recompute: bool = _GRAPH(False)
    recompute_configs: RecomputeConfigs = _GRAPH(RecomputeConfigs())

    localsgd: bool = _LOCAL(False)
    localsgd_configs: LocalSGDConfigs = _LOCAL(LocalSGDConfigs())
    adaptive_localsgd: bool = _LOCAL(False)
    adaptive_localsgd_configs: AdaptiveLocalSGDConfigs = _LOCAL(AdaptiveLocalSGDConfigs())
    gradient_merge: bool = _MERGE(False)
    gradient_merge_configs: GradientMergeConfigs = _MERGE(GradientMergeConfigs())

    sharding: bool = _SHARDED._replace(says="plan clock restarts")(False)
    sharding_configs: ShardingConfigs = _SHARDED(ShardingConfigs())

    a_sync: bool = _SERVED(False)
    a_sync_configs: ASyncConfigs = _SERVED(ASyncConfigs())
    overlap_push: bool = _SIMULATED(False)
    """Synchronous servers: push each bucket when its gradients are ready, beside the backward; off: all after it. In ``sim`` alone."""
    reduce_in_node: bool = _SIMULATED(False)
    """Synchronous servers: the trainers of a node reduce among themselves, and one of them pushes and pulls. In ``sim`` alone."""

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
            raise ConfigError("computes in what it gathers", where, value, 'set amp = true and amp_configs.dtype = "bf16" with it')
        for both, one, other, reason in self._exclusions():
            if both:
                where = one.replace("Local SGD", "adaptive_localsgd" if self.adaptive_localsgd else "localsgd")
                raise ConfigError(f"{one} and {other} exclude each other: {reason}", where, hint="keep one of them")

    def _exclusions(self) -> tuple[tuple[bool, str, str, str], ...]:
        """Combinations without a meaning: whether both are on, their names, and why."""
        build, merge, average = self.build_strategy, self.gradient_merge_configs, self.averaging
        half, unused, synced = (self.fp16_allreduce or self.bf16_allreduce), self.find_unused_parameters, self.sync_batch_norm
        by_bucket, fuses = not build.enable_backward_optimizer_op_deps, build.fuse_all_optimizer_ops
        update, fused = "build_strategy.enable_backward_optimizer_op_deps = false", "build_strategy.fuse_all_optimizer_ops"
        sequential, hierarchy = "build_strategy.enable_sequential_execution", "use_hierarchical_allreduce"
        state, changes = 'optimizer_state = "average"', "Fleet would change it silently"
        served, local = self.mode == "ps", self.localsgd_configs
        stays, parts, rounds = "the inner optimizer's state stays local", "fragments", "fragments have rounds of their own"
        resets, shares_state = average.momentum == "reset", average.optimizer_state == "average"
        in_order, feeds_back = build.enable_sequential_execution, self.localsgd and local.outer_error_feedback
        int8, fp32 = 'outer_wire = "int8"', 'outer_wire = "fp32"'
        alone = "blocks follow one another on one communicator"
        cut, averages = self.localsgd and local.has_fragments, self.is_local and not self.has_outer
        return (
            (self.localsgd and self.adaptive_localsgd, "localsgd", "adaptive_localsgd", "one of them says when trainers meet"),
            (self.fp16_allreduce and self.bf16_allreduce, "fp16_allreduce", "bf16_allreduce", "a bucket travels in one type"),
            (self.a_sync and self.mode == "collective", "a_sync", 'mode = "collective"', "only servers are asynchronous"),
            (served and self.localsgd, "localsgd", 'mode = "ps"', "trainers of servers do not meet"),
            (served and self.adaptive_localsgd, "adaptive_localsgd", 'mode = "ps"', "trainers of servers do not meet"),
            (served and self.use_hierarchical_allreduce, hierarchy, 'mode = "ps"', "nothing is all-reduced"),
            (averages and half, "Local SGD", "a 16-bit wire", "what the wire loses of a parameter is lost for good"),
            (self.quantises and not self.has_outer, int8, "averaging alone", "what the wire loses of a parameter is lost for good"),
            (self.quantises and half, int8, "a 16-bit wire", "a bucket travels in one type"),
            (self.quantises and self.use_hierarchical_allreduce, int8, hierarchy, "it is one all-to-all of all trainers"),
            (self.is_local and synced, "Local SGD", "sync_batch_norm", "it would meet in every layer of every step"),
            (self.is_local and by_bucket, "Local SGD", update, "no bucket arrives in its steps"),
            (self.scales_loss and by_bucket, update, "amp", "an update cannot be undone when a later bucket overflows"),
            (unused and by_bucket, update, "find_unused_parameters", "what was unused is known after the last bucket"),
            (fuses and by_bucket, update, fused, "one update of all, or one a bucket"),
            (unused and fuses, fused, "find_unused_parameters", "one update cannot leave some out"),
            (self.scales_loss and merge.remainder == "flush", 'remainder = "flush"', "amp", "an epoch's end knows of no overflow"),
            (in_order and not self.sync_nccl_allreduce, sequential, "sync_nccl_allreduce = false", "one stream has nothing beside it"),
            (resets and shares_state, 'momentum = "reset"', state, "momentum is part of the optimizer's state"),
            (self.has_outer and average.momentum != "local", "outer_lr", "momentum other than local", stays),
            (self.has_outer and shares_state, "outer_lr", state, stays),
            (cut and local.schedule != "fleet", parts, "schedule other than fleet", rounds),
            (cut and average.buffers == "average", parts, 'buffers = "average"', "statistics belong to no fragment"),
            (cut and self.gradient_merge and merge.remainder == "flush", parts, 'remainder = "flush"', rounds),
            (cut and self.scales_loss, parts, "amp", "a skipped update would still count in a fragment's round"),
            (synced and self.nccl_comm_num > 1, "sync_batch_norm", "nccl_comm_num above 1", changes),
            (synced and self.use_hierarchical_allreduce, "sync_batch_norm", hierarchy, changes),
            (synced and self.thread_num > 1, "sync_batch_norm", "thread_num above 1", changes),
            (feeds_back and not self.quantises, "outer_error_feedback", fp32, "nothing is lost on the wire"),
            (self.a_sync and self.overlap_push, "overlap_push", "a_sync", "asynchronous pushes are beside the next steps"),
            (self.a_sync and self.reduce_in_node, "reduce_in_node", "a_sync", "trainers of a node would wait for each other"),
            (served and self.sharding, "sharding", 'mode = "ps"', "servers hold the parameters"),
            (self.sharding and self.adaptive_localsgd, "adaptive_localsgd", "sharding", "a worker of several trainers has no loss"),
            (self.sharding and cut, parts, "sharding", "a block belongs to no fragment"),
            (self.sharding and self.quantises, int8, "sharding", "it is one all-to-all of all trainers"),
            (self.sharding and shares_state, state, "sharding", "a trainer has a shard of it"),
            (self.sharding and average.momentum != "local", "momentum other than local", "sharding", "a trainer has a shard of it"),
            (self.sharding and average.buffers == "average", 'buffers = "average"', "sharding", "statistics are a trainer's, no worker's"),
            (self.sharding and self.localsgd and local.outer_on_host, "outer_on_host", "sharding", "a trainer has a shard of it"),
            (self.sharding and self.use_hierarchical_allreduce, hierarchy, "sharding", "its groups are those of sharding_degree"),
            (self.sharding and self.fusion != "fleet", "fusion", "sharding", "a block is a bucket"),
            (self.sharding and self.nccl_comm_num > 1, "nccl_comm_num above 1", "sharding", alone),
            (self.sharding and not self.sync_nccl_allreduce, "sync_nccl_allreduce = false", "sharding", alone),
            (self.sharding and unused, "find_unused_parameters", "sharding", "every block is scattered in every step"),
            (self.sharding and by_bucket, update, "sharding", "a trainer updates its shard of all blocks at once"),
            (self.sharding and in_order, sequential, "sharding", "gathers run beside compute"),
            (self.sharding and merge.remainder == "flush", 'remainder = "flush"', "sharding", "shards are added in a backward"),
        )

    @classmethod
    def translate(cls, data: Mapping[str, Any]) -> dict[str, Any]:
        """Translate Fleet's older and misleading names into today's fields."""
        return translate(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DistributedStrategy:
        """Decode plain TOML data, Fleet's names included."""
        return decode(data, cls, "strategy")

    @classmethod
    def load(cls, path: str | Path) -> DistributedStrategy:
        """Read a strategy file such as ``recommended.toml`` (a ``[strategy]`` table, or its keys).

        An experiment file gives its ``[strategy]``. Raises ``ConfigError``, which names the file, where it cannot be read or
        holds no strategy.
        """
        return cls.parse(read_text(path, "fleetbench tune writes recommended.toml"), str(path))

    @classmethod
    def parse(cls, text: str, path: str) -> DistributedStrategy:
        """The strategy in the text of a file at ``path``. Raises ``ConfigError`` as ``load`` does."""
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
        """Write a ``[strategy]`` table of what differs from the defaults, below its digest and ``comments``, each a line."""
        header = "".join(f"# {line}\n" for line in comments)
        write_whole(Path(path), sealed(header + tomli_w.dumps({"schema": SCHEMA, "strategy": self.changes()})))

    def changes(self) -> dict[str, Any]:
        """What differs from Fleet's defaults, as plain TOML data."""
        return difference(encode(self), encode(DistributedStrategy()))

    def replace(self, **changes: Any) -> DistributedStrategy:
        """A copy with some fields changed.

        A ``*_configs`` may be given as a table: the keys that it names change, the others stay.
        Raises ``ConfigError`` for an unknown field.
        """
        translated = self.translate(changes)
        for name, value in translated.items():
            if isinstance(value, Mapping) and isinstance(getattr(self, name, None), Config):
                translated[name] = {**encode(getattr(self, name)), **value}
        return dataclasses.replace(self, **translated)

    def without(self, *names: str) -> DistributedStrategy:
        """A copy with some fields, by dotted name, at their defaults, and with them what is read with these alone."""
        plain, reset = DistributedStrategy(), dict[str, dict[str, Any]]()
        for name in (name.removeprefix("strategy.") for name in names):
            table, _, key = name.rpartition(".")
            reset.setdefault(table, {})[key] = attrgetter(name)(plain)
        values = reset.pop("", {}) | {table: dataclasses.replace(getattr(self, table), **keys) for table, keys in reset.items()}
        values |= {name: getattr(plain, name) for switch, on, name in _NEEDED if values.get(switch, getattr(self, switch)) not in on}
        return dataclasses.replace(self, **values)

    @property
    def scales_loss(self) -> bool:
        """Whether losses are scaled against underflow, as FP16 needs it and BF16 does not."""
        return self.amp and self.amp_configs.dtype == "fp16"

    @property
    def fuses_by_cost(self) -> bool:
        """Whether buckets follow from what an all-reduce costs and from when gradients are ready."""
        return self.fusion in ("merged_gradient", "optimal")

    @property
    def is_local(self) -> bool:
        """Whether trainers update alone and average parameters, at fixed or adaptive steps."""
        return self.localsgd or self.adaptive_localsgd

    @property
    def averaging(self) -> Averaging:
        """What trainers that update alone average besides parameters."""
        return self.adaptive_localsgd_configs if self.adaptive_localsgd else self.localsgd_configs

    @property
    def has_outer(self) -> bool:
        """Whether rounds of Local SGD end with a step of an outer optimizer, or are those of fragments."""
        return (self.is_local and self.averaging.has_outer) or (self.localsgd and self.localsgd_configs.has_fragments)

    @property
    def quantises(self) -> bool:
        """Whether differences travel in INT8."""
        return self.localsgd and self.localsgd_configs.outer_wire == "int8"

    @property
    def needs_linear_optimizer(self) -> bool:
        """Whether trainers average parameters after every update, but no state: a step of averages for ``LINEAR_OPTIMIZERS`` alone."""
        every = self.localsgd and self.localsgd_configs.k_steps == 1
        return every and not self.has_outer and self.averaging.optimizer_state != "average"

    @property
    def follows_loss(self) -> bool:
        """Whether it must be told losses."""
        return self.adaptive_localsgd and self.adaptive_localsgd_configs.variant != "qsr"

    @property
    def averages_state(self) -> bool:
        """Whether trainers that update alone average their optimizers' state."""
        return self.is_local and (self.averaging.momentum == "average" or self.averaging.optimizer_state == "average")

    @property
    def local_steps(self) -> int:
        """K of a fixed Local SGD schedule; 1 when trainers meet at every step."""
        return self.localsgd_configs.k_steps if self.localsgd else 1


_EXPERIMENT = frozenset({"name", "strategy", "workload", "cluster", "tune", "run"})
"""What an experiment file may hold at its top."""


def difference(data: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of ``data`` whose values differ from ``base``, tables within tables."""
    changed: dict[str, Any] = {}
    for key, value in data.items():
        if key in base and value == base[key]:
            continue
        nested = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        changed[key] = difference(value, base[key]) if nested else value
    return changed
