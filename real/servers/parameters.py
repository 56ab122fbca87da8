"""Parameters of a model as servers hold them: dense ones as one vector, embeddings with sparse gradients as tables.

``Shard`` is one server's part of them, with the optimizer's state. ``Parameters`` is a trainer's model, and
``join`` lets the trainer enter a job: rank 0 sends the parameters to servers that have none, and all other trainers
take those that the servers hold.

A trainer's dense parameters become views of one storage; its tables stay where they are. Torch does all work on
rows, and lets other threads run meanwhile.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from fleetbench.config import Config, decode
from fleetbench.errors import ConfigError
from fleetbench.plan.servers.rules import ServerRules, Shards
from fleetbench.workloads.server_updates import DTYPES, OPTIONS, ROW, Array, Change, Layout, ParameterShard, Told, part_of, views_of
from fleetbench.workloads.training import sparse_weights
from real.engine.sparse import refuse_unknown_sparse
from real.servers.links import Answer, Head, Links, numbers

VERSION = np.dtype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(Config):
    """Description of a job's model, optimizer and rules, equal on all trainers: all that a server knows of a script."""

    rules: ServerRules
    shards: Shards
    """Part of the parameters that each server holds."""
    dense: tuple[str, ...]
    """Name and number of elements of each dense parameter, as ``bias 5``, in the model's order."""
    dtype: str
    optimizer: str
    options: dict[str, float]

    def to_json(self) -> bytes:
        """Return the description as JSON, for messages and checkpoints."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes | memoryview | str) -> Self:
        """Read the JSON that ``to_json`` wrote."""
        return decode(json.loads(text if isinstance(text, str) else bytes(text)), cls, "")


def differences(held: Spec, told: Spec, *, model_only: bool = False) -> str:
    """Return in what a trainer's description differs from a server's, as a message; empty if it does not.

    ``model_only``: leave out the rules and the optimizer's options, which may change from job to job.
    """
    names = ["shards", "dense", "dtype", "optimizer"] if model_only else [field.name for field in dataclasses.fields(held)]
    found = [
        f"{name} ({a} on the server, {b} on the trainer)" for name in names if (a := getattr(held, name)) != (b := getattr(told, name))
    ]
    return f"it differs in {'; '.join(found)}" if found else ""


class Shard(ParameterShard):
    """Part ``server`` of a model's parameters, with its optimizer's state."""

    def __init__(self, spec: Spec, server: int) -> None:
        self.spec = spec
        super().__init__(spec.shards, server, DTYPES[spec.dtype], (spec.optimizer, spec.options), spec.rules.readers)

    def adopt(self, spec: Spec) -> None:
        """Continue from a checkpoint with the rules and options of ``spec``, which has the same model and optimizer.

        No row is marked as changed, because every trainer takes all parameters when it joins.
        """
        self.spec, self.optimizer.options = spec, spec.options
        self._changed = self._flags(spec.rules.readers)

    def read_push(self, head: Head, tensors: Sequence[memoryview]) -> Change:
        """Return the push in a message: versions, dense numbers, and rows and values of each table."""
        dense = read_tensor(tensors[1], self.dense.dtype, (-1,))
        tables = []
        for table, rows_body, body in zip(self.tables, tensors[2::2], tensors[3::2], strict=True):
            rows = read_tensor(rows_body, ROW, (-1,))
            tables.append((rows, read_tensor(body, table.dtype, (len(rows), table.shape[1]))))
        return Change(dense if len(dense) else None, tables, head.rate, numbers(tensors[0], VERSION, (-1,)))


def read_tensor(body: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the numbers in a message's frame as a writable tensor; -1 in ``shape`` as in numpy."""
    return torch.from_numpy(np.require(numbers(body, dtype, shape), requirements="W"))  # torch warns about read-only memory


_HINT = "servers have torch.optim.SGD, Adagrad, Adam and SparseAdam"
_KINDS = {
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    torch.optim.Adam: "adam",
    torch.optim.SparseAdam: "sparse_adam",
}
_NOT_THERE = ("maximize", "amsgrad", "dampening", "decoupled_weight_decay")


class Parameters(Layout):
    """The trained parameters of one model; dense ones become views of one vector.

    Raises ``ConfigError`` for parameters that servers cannot hold.
    """

    named: dict[str, nn.Parameter]

    def __init__(self, model: nn.Module) -> None:
        sparse = sparse_weights(model)
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not named:
            raise ConfigError("has nothing to train", "fleet.distributed_model", hint="some parameter needs requires_grad")
        dtype = next(iter(named.values())).dtype
        for name, parameter in named.items():
            if parameter.device.type != "cpu" or parameter.dtype != dtype or dtype not in (torch.float32, torch.float64):
                value = f"{parameter.dtype} on {parameter.device}"
                hint = "keep the model on the CPU, all of it in float32 or all in float64"
                raise ConfigError("is no parameter that servers hold", f"parameter {name}", value, hint)
        super().__init__(named, sparse)
        for parameter, home in zip(named.values(), self.parameters(self.flat, self.tables), strict=True):
            parameter.data = home
        self._homes = [(model.get_submodule(name.rpartition(".")[0]), name, named[name], named[name].data_ptr()) for name in named]

    @property
    def nbytes(self) -> int:
        """Size of all parameters in bytes."""
        return sum(value.nbytes for value in (self.flat, *self.tables))

    def spec(self, rules: ServerRules, told: Told) -> Spec:
        """Return the description of model, optimizer and rules for the servers."""
        dense = tuple(f"{name} {value.numel()}" for name, value in self.dense.items())
        dtype = str(self.flat.dtype).removeprefix("torch.")
        return Spec(rules=rules, shards=self.shards(rules.servers), dense=dense, dtype=dtype, optimizer=told[0], options=told[1])

    def refuse_moved(self) -> None:
        """Raise ``ConfigError`` if a parameter or its storage has been replaced: it would not be trained."""
        for module, name, parameter, pointer in self._homes:
            if getattr(module, name.rpartition(".")[2]) is not parameter or parameter.data_ptr() != pointer:
                what = "is no more where it was when the model was distributed, and would not be trained"
                hint = "call model.to(...), load_state_dict(..., assign=True) and their like before fleet.distributed_model"
                raise ConfigError(what, f"parameter {name}", hint=hint)

    def gradients(self) -> Change:
        """Return a copy of the step's gradients.

        Parameters that the loss does not use have zeros, or no rows.
        """
        for name, parameter in self.named.items():
            refuse_unknown_sparse(name, parameter.grad, self.sparse)
        return self.change([parameter.grad for parameter in self.named.values()])


def shard_change(change: Change, shards: Shards, server: int) -> list[Array]:
    """Return the tensors of a push to one server: versions, dense numbers, then rows and values of each table."""
    part = part_of(change, shards, server)
    dense = np.zeros(0, np.float32) if part.dense is None else part.dense.numpy()
    return [part.versions, dense, *(tensor.numpy() for pair in part.tables for tensor in pair)]


def read_values(body: memoryview, like: torch.Tensor) -> torch.Tensor:
    """Return the numbers in a message's frame as a vector, or as rows of the same width as ``like``."""
    return read_tensor(body, like.numpy().dtype, (-1, *like.shape[1:]))


def read_pull(answer: Answer, parameters: Parameters) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return a server's answer to a GeoSGD pull: its dense parameters as a vector, and the changed rows of each table.

    A table's rows are given by the server's row numbers, ``(rows,)``, and their values, ``(rows, width)``.
    """
    parts = zip(parameters.tables, answer.tensors[1::2], answer.tensors[2::2], strict=True)
    tables = [(read_tensor(rows, ROW, (-1,)), read_values(values, table)) for table, rows, values in parts]
    return read_values(answer.tensors[0], parameters.flat), tables


def options_of(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Told:
    """Return the name and options by which servers know an optimizer.

    Raises ``ConfigError`` for an optimizer or options that servers do not have, for groups that differ, and for a
    parameter that no group has.
    """
    name, group = _KINDS.get(type(optimizer)), optimizer.param_groups[0]
    if name is None:
        raise ConfigError("is no optimizer of a server", "optimizer", type(optimizer).__name__, _HINT)
    refuse_changes(optimizer, fixed_options(optimizer))
    rate_of(optimizer)
    held = {id(parameter) for every in optimizer.param_groups for parameter in every["params"]}
    for missing in (named for named, own in parameters.named.items() if id(own) not in held):
        hint = "servers update all; set requires_grad = False for the others"
        raise ConfigError("is trained by no optimizer", f"parameter {missing}", hint=hint)
    for option in _NOT_THERE:
        if group.get(option):
            hint = f"set {option} = {'0' if option == 'dampening' else 'False'}"
            raise ConfigError(f"has {option}, which servers do not have", "optimizer", repr(group[option]), hint)
    if group.get("weight_decay") and parameters.tables:
        what = "has a weight decay, and embeddings have sparse gradients"
        raise ConfigError(what, "optimizer", repr(float(group["weight_decay"])), "set weight_decay = 0")
    if name == "sparse_adam" and parameters.dense:
        what = "has a dense gradient, and SparseAdam trains sparse ones alone"
        raise ConfigError(what, f"parameter {next(iter(parameters.dense))}", hint="servers' Adam trains both")
    if name == "sgd" and group["momentum"]:
        name = "momentum"
    first, second = group.get("betas", (0.0, 0.0))
    given = {"weight_decay": 0.0, **group, "beta1": first, "beta2": second}
    return name, {option: float(given[option]) for option in OPTIONS[name]}


def fixed_options(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """Return the options that servers receive only once: those of the first group, without the learning rate."""
    return {name: optimizer.param_groups[0][name] for name in optimizer.defaults if name != "lr"}


def refuse_changes(optimizer: torch.optim.Optimizer, fixed: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` if an option of a group differs from ``fixed``, which servers would continue to use."""
    for group in optimizer.param_groups:
        for name, value in fixed.items():
            if group[name] != value:
                what = f"has {name} = {group[name]!r}, and servers were told {value!r}, of all groups and when training began"
                hint = "give all groups one set of options; with a scheduler, OneCycleLR(cycle_momentum=False) keeps them"
                raise ConfigError(what, "optimizer", type(optimizer).__name__, hint)


def rate_of(optimizer: torch.optim.Optimizer) -> float:
    """Return a step's learning rate. Raises ``ConfigError`` if groups have different rates, or one is not finite."""
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) > 1 or not all(map(math.isfinite, rates)):
        hint = "servers take one for all parameters; look at what schedules it"
        raise ConfigError("has groups with several learning rates, or a rate that is no number", "optimizer", str(sorted(rates)), hint)
    return rates.pop()


def join(links: Links, spec: Spec, parameters: Parameters) -> tuple[int, ...]:
    """Join all servers, and copy their parameters into ``parameters``; rank 0 sends its own to servers without any.

    Returns the number of updates that each server had made by then. Raises ``WorkerFailed`` if a server does not
    answer, or if rank 0 sends it no parameters. Raises ``ConfigError`` if servers refuse this trainer and, on rank 0,
    if only some of the servers have a checkpoint.
    """
    for server in range(spec.rules.servers):
        links.ask(server, "join", [spec.to_json()])
    joined = links.wait(links.options.startup_timeout_s)
    blank = [answer.server for answer in joined if answer.kind == "blank"]
    trained = next((answer for answer in joined if answer.version), None)
    if blank and trained is not None:  # initial parameters on some servers and trained ones on others are not one model
        what = f"has no checkpoint to begin from, where server {trained.server} goes on after {trained.version} updates"
        hint = "every server needs its shard of the same checkpoint in its fleet.init_server(FOLDER), or none of them has one"
        raise ConfigError(what, f"server {blank[0]}", links.options.endpoints[blank[0]], hint)
    for answer in joined:
        own = views_of(spec.shards, answer.server, parameters.flat, parameters.tables)
        if answer.kind == "blank":
            links.ask(answer.server, "initial", [part.numpy() for part in own])
        for part, body in zip(own, answer.tensors, strict=False):  # a blank server has none
            part.copy_(read_values(body, part))
    links.settle()
    return tuple(answer.version for answer in joined)
