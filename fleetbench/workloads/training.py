"""Training of a workload, shared by all executors that really train, so that they follow the same trajectory."""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from fleetbench.declared import learning_rate
from fleetbench.errors import ConfigError
from fleetbench.experiment import Experiment
from fleetbench.workload import Workload
from fleetbench.workloads.data.data import held_out, num_training_samples
from fleetbench.workloads.data.reader import Sampler, Unlike
from fleetbench.workloads.models.registry import Loss

_EVALUATED = 512
"""Number of held-out samples in one forward."""


class HeldOut:
    """The held-out split, with a separate model for evaluation."""

    def __init__(self, model: nn.Module, data: Path, compare: Loss) -> None:
        self._model = model.eval()
        self._compare = compare
        self._data = data

    def loss(self, flat: torch.Tensor) -> float:
        """Return the mean loss with ``flat``, the tensors of ``evaluated`` as one vector."""
        return self.loss_and_accuracy(flat)[0]

    @torch.no_grad()
    def loss_and_accuracy(self, flat: torch.Tensor) -> tuple[float, float | None]:
        """Return the mean loss and the accuracy, which is None unless the loss is cross-entropy."""
        tensors = evaluated(self._model.to(flat.device))
        for tensor, piece in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(piece.view_as(tensor))
        inputs, labels = held_out(self._data)
        total, right = 0.0, 0
        for some, their in zip(torch.split(inputs, _EVALUATED), torch.split(labels, _EVALUATED), strict=True):
            outputs, wanted = self._model(some.to(flat.device)), their.to(flat.device)
            total += float(self._compare(outputs, wanted, reduction="sum"))
            right += int((outputs.argmax(-1) == wanted).sum()) if self._compare is cross_entropy else 0
        return total / len(labels), right / len(labels) if self._compare is cross_entropy else None


def evaluated(model: nn.Module) -> list[torch.Tensor]:
    """Return the tensors that an evaluation depends on: parameters, then floating-point buffers."""
    return [*model.parameters(), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]


def sparse_embeddings(model: nn.Module) -> list[nn.Embedding | nn.EmbeddingBag]:
    """Return the modules whose weights have sparse gradients."""
    return [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse]


def sparse_weights(model: nn.Module) -> frozenset[str]:
    """Return the names of the parameters with sparse gradients."""
    modules = {id(module.weight) for module in sparse_embeddings(model)}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in modules)


def refuse_dense_optimizer(model: torch.nn.Module, workload: Workload) -> None:
    """Raise ``ConfigError`` if trainers update sparse gradients with an unsuitable optimizer."""
    if (workload.optimizer == "adam" or workload.weight_decay) and (sparse := sparse_weights(model)):
        adam = workload.optimizer == "adam"
        where, value = ("optimizer", repr(workload.optimizer)) if adam else ("weight_decay", str(workload.weight_decay))
        servers = '; parameter servers (strategy.mode = "ps", except for GeoSGD) take adam' if adam else ""
        hint = f"use sgd or adagrad, without weight_decay{servers}"
        raise ConfigError(f"cannot update {min(sparse)}, whose gradients are sparse", f"workload.{where}", value, hint)


def sampler_of(experiment: Experiment, data: Path, trainers: int, rank: int) -> Sampler:
    """Return the sampler of a trainer's batches from the prepared ``data``.

    Raises ``ConfigError`` if there are too few samples for one batch per trainer.
    """
    workload, num_samples = experiment.workload, num_training_samples(data)
    if workload.batch_size * trainers > num_samples and workload.uneven_data == "cut":
        raise ConfigError("is more than there are samples for", "workload.batch_size", str(workload.batch_size), 'use uneven_data = "pad"')
    return Sampler(
        num_samples=num_samples,
        batch_size=workload.batch_size,
        trainers=trainers,
        rank=rank,
        seed=experiment.run.seed,
        uneven=workload.uneven_data,
        wanted_steps=workload.steps_per_epoch,
        unlike=Unlike(trainers, workload.batch_size, workload.unlike_data, data / "y_train.npy") if workload.unlike_data else None,
    )


def make_optimizer(model: torch.nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """Return the workload's optimizer."""
    parameters, decay = model.parameters(), workload.weight_decay
    if workload.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=workload.lr, weight_decay=decay)
    if workload.optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=workload.lr, weight_decay=decay)
    momentum = workload.momentum if workload.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=workload.lr, momentum=momentum, weight_decay=decay)


def set_learning_rate(optimizer: torch.optim.Optimizer, workload: Workload, step: int) -> None:
    """Set the learning rate of ``step`` according to the workload's decay."""
    rate = learning_rate(workload, step)
    for group in optimizer.param_groups:
        group["lr"] = rate
