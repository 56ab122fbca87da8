"""Workload: the model, its data and its optimizer."""

from dataclasses import dataclass, field
from typing import Literal

from fleetbench.config import Config, at_least, field_types
from fleetbench.errors import ConfigError
from fleetbench.quantities import Bytes, Nanoseconds, Steps

LAYERS = "layers"
"""Model name for a table of layers in the experiment file."""

EXAMPLE_LAYERS = 'layers = [{ name = "block", params = 31_250, forward = "2.5 ms", backward = "5 ms", repeat = 20 }]'
"""Example of a table of layers, as in an experiment file."""

EXAMPLE_EMBEDDING = 'layers = [{ name = "table", rows = 1_000_000, width = 64, touched = 4_096, forward = "1 ms", backward = "1 ms" }]'
"""Example of an embedding with a sparse gradient, as in an experiment file."""

MOST_REPEATS = 10**6
"""Largest ``repeat`` of an entry of ``workload.layers``."""

OPTIMIZER_STATE: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
}
"""Names that torch gives the state tensors of each optimizer. Each tensor has the shape of its parameter."""

LINEAR_OPTIMIZERS = ("sgd", "momentum")
"""Optimizers for which the average of steps from one state is a step of averages. Local SGD then averages
only the parameters."""

ModelOption = bool | int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec(Config):
    """One entry of ``workload.layers``: a layer, possibly repeated."""

    name: str
    """Name of the layer."""
    params: int | None = None
    """Number of elements of the layer's gradient, if the layer has at most one gradient; 0: no gradient."""
    tensors: tuple[int, ...] = ()
    """Number of elements of each gradient, if the layer has several."""
    rows: int = 0
    """Number of rows of an embedding with a sparse gradient, in place of ``params``; 0: dense gradients."""
    width: int = 1
    """Number of elements of a row."""
    touched: int = 0
    """Number of different rows that one trainer's step touches."""
    forward: Nanoseconds
    """Time of the layer's forward."""
    backward: Nanoseconds
    """Time of the layer's backward."""
    buffers: Bytes = Bytes(0)
    """Total size of the layer's buffers, such as batch-norm statistics."""
    repeat: int = 1
    """Number of copies of the layer, one after another."""

    def _validate(self) -> None:
        if [self.params is not None, bool(self.tensors), self.rows != 0].count(True) != 1 or min((self.params or 0, *self.tensors)) < 0:
            value = f"params {self.params}, tensors {list(self.tensors)}, rows {self.rows}"
            raise ConfigError("needs one of params, tensors and rows, of no negative size", self.name, value, EXAMPLE_LAYERS)
        if not (1 <= self.touched <= self.rows or self.touched == self.rows == 0) or self.width < 1:
            value = f"rows {self.rows}, width {self.width}, touched {self.touched}"
            raise ConfigError("a step touches at least one row, and no more than there are", self.name, value, EXAMPLE_EMBEDDING)
        at_least(self, 0, "buffers", "forward", "backward")
        at_least(self, 1, "repeat", most=MOST_REPEATS)

    @property
    def gradients(self) -> dict[str, int]:
        """Number of elements of each gradient by name: ``weight``, or ``tensor0``, ``tensor1``, ... if several."""
        one = self.rows * self.width or self.params
        return {f"tensor{place}": numel for place, numel in enumerate(self.tensors)} or ({"weight": one} if one else {})

    @property
    def names(self) -> list[str]:
        """Names of the layers: the entry's own name, followed by an index if it repeats."""
        return [self.name] if self.repeat == 1 else [f"{self.name}{index}" for index in range(self.repeat)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork(Config):
    """Costs of a step besides its layers, for ``model = "layers"``.

    ``fleetbench.plan.layers`` defines when a step waits for a batch.
    """

    read: Nanoseconds = Nanoseconds(0)
    """Time of the loop's own work in every step."""
    load: Nanoseconds = Nanoseconds(0)
    """Time to make one batch."""
    loaders: int = 0
    """Number of processes per trainer that make batches in parallel with compute; 0: the loop makes them
    itself."""
    prefetch: int = 2
    """Number of batches that each of the ``loaders`` may prepare in advance."""
    fetch: Nanoseconds = Nanoseconds(0)
    """Time to read results back from the device, once every ``strategy.fetch_every_n_steps`` steps."""
    update: Nanoseconds = Nanoseconds(0)
    """Time of one optimizer step over all parameters."""
    merge: Nanoseconds = Nanoseconds(0)
    """Time of Local SGD's merge: packing the parameter differences and applying their average. An outer
    optimizer with momentum takes another 0.8 of this time."""
    per_collective: Nanoseconds = Nanoseconds(0)
    """Host time to start one collective, which delays compute."""
    pack: Nanoseconds = Nanoseconds(0)
    """Time to copy all gradients into their buckets."""

    def _validate(self) -> None:
        at_least(self, 0, *(name for name in field_types(HostWork) if name != "prefetch"))
        at_least(self, 1, "prefetch")


@dataclass(frozen=True, slots=True, kw_only=True)
class LrDecay(Config):
    """Change of the learning rate: from ``step`` on (counted from 1) it is multiplied by ``factor``."""

    step: int
    """First step with the changed rate, counted from 1."""
    factor: float
    """Factor on the learning rate."""

    def _validate(self) -> None:
        at_least(self, 1, "step")
        at_least(self, 0, "factor", above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve(Config):
    """A declared loss: ``floor + (start - floor) / 2 ** (step / half_life)``."""

    start: float
    """Loss at step 0."""
    floor: float
    """Loss that the curve approaches."""
    half_life: Steps
    """Number of steps in which the distance to ``floor`` halves."""

    def _validate(self) -> None:
        at_least(self, 0, "half_life", above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(Config):
    """Work of one trainer: each step is one forward and backward over ``batch_size`` samples."""

    model: str = "digits_mlp"
    """Model: a name in the registry, ``layers``, or the ``config.json`` of a model as Hugging Face publishes
    it."""
    model_options: dict[str, ModelOption] = field(default_factory=dict)
    """Options of the registry model, such as its sizes."""
    data: str = "digits"
    """Data: ``digits``, ``synthetic``, ``pydocs``, ``imagenet:DIR`` or ``text:FILE``."""
    data_options: dict[str, ModelOption] = field(default_factory=dict)
    """Options of the data, such as ``image_size``, ``length``, or ``workers`` that decode."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of parameters and gradients."""
    batch_size: int = 32
    """Number of samples per trainer and step."""
    steps: int = 600
    """Number of counted steps per trainer."""
    steps_per_epoch: int | None = None
    """Number of steps per epoch. Default: all steps that the data gives."""
    uneven_data: Literal["cut", "pad"] = "cut"
    """Treatment of samples that do not fill a step of every trainer: leave them out (``cut``), or fill the step
    up with other samples (``pad``)."""
    unlike_data: float = 0.0
    """Share of a trainer's samples that come from its own part of the data: from a few classes, or from one
    part of a text."""
    optimizer: Literal["sgd", "momentum", "adagrad", "adam"] = "sgd"
    """Optimizer of the parameters."""
    lr: float = 0.1
    """Learning rate."""
    momentum: float = 0.9
    """Coefficient of the ``momentum`` optimizer."""
    weight_decay: float = 0.0
    """Coefficient of weight decay."""
    lr_decay: tuple[LrDecay, ...] = ()
    """Changes of the learning rate. Their factors multiply."""
    target_loss: float | None = None
    """Mean loss on the held-out split at which training counts as done."""
    eval_every: int = 20
    """Number of steps between two evaluations on the held-out split."""
    profile: str | None = None
    """Path of a profile, a file with measured layer tables."""
    layers: tuple[LayerSpec, ...] = ()
    """Table of layers, for ``model = "layers"``."""
    host: HostWork | None = None
    """Costs of a step besides declared layers. For a registry model, the profile measures them."""
    loss_curve: LossCurve | None = None
    """Declared loss, for runs that train nothing."""

    def _validate(self) -> None:
        at_least(self, 1, "batch_size", "steps", "eval_every", "steps_per_epoch")
        at_least(self, 0, "lr", above=True)
        at_least(self, 0, "weight_decay")
        if not 0 <= self.momentum < 1:
            raise ConfigError("must be at least 0 and below 1", "momentum", repr(self.momentum), "the default is 0.9")
        at_least(self, 0, "unlike_data", most=1)
        self._check_loss_and_layers()

    def _check_loss_and_layers(self) -> None:
        if self.model == LAYERS:
            if not self.layers:
                raise ConfigError('model = "layers" needs a table of layers', "layers", hint=EXAMPLE_LAYERS)
            names = [name for spec in self.layers for name in spec.names]
            if len(set(names)) < len(names):
                raise ConfigError(
                    "two layers have one name", "layers", repr(max(names, key=names.count)), "repeat = 2 makes block0 and block1"
                )
            if self.target_loss is not None and self.loss_curve is None:
                raise ConfigError(
                    "a table of layers has no loss of its own",
                    "target_loss",
                    repr(self.target_loss),
                    "drop target_loss, or choose a registry model such as digits_mlp",
                )
        elif self.host is not None:
            hint = 'drop host: the profile holds it; or set model = "layers"'
            raise ConfigError("host work is declared, but the model's is measured", "host", hint=hint)
        elif self.layers:
            raise ConfigError("layers are given, but the model is another", "model", repr(self.model), 'set model = "layers"')
