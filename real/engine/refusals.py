"""Refusals: errors for training loops that no strategy can execute as written, raised at the line in question."""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.amp import GradScaler
from torch.jit import RecursiveScriptModule
from torch.nn.parameter import is_lazy

from fleetbench.errors import ConfigError
from fleetbench.plan.build import Plan
from fleetbench.plan.combination import Combination
from fleetbench.strategy import DistributedStrategy
from real.engine.phase import Phase
from real.engine.reducer import PlannedReducer

WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DDP"})
"""Names of torch's classes that exchange gradients or shard parameters by themselves; ``replicate`` makes a ``DDP``."""


def refuse_wrappers(model: nn.Module) -> None:
    """Raise ``ConfigError`` if the model is or holds one of torch's wrappers: both would exchange gradients."""
    for name, module in model.named_modules():
        if kind := _wrapper_of(module):
            _refuse_wrapper(kind, f"module {name}" if name else "the model")
    for name, parameter in model.named_parameters():
        if _torch_class(parameter, {"DTensor"}):
            _refuse_wrapper("DTensor", f"parameter {name}")


def refuse_wrapper_around(parameters: Collection[nn.Parameter], wrapper: nn.Module | None, module: nn.Module | None = None) -> None:
    """Raise ``ConfigError`` if one of torch's wrappers, or a ``module`` given to it, holds any of the parameters."""
    if wrapper is None or isinstance(wrapper, PlannedReducer) or not (kind := _wrapper_of(wrapper)):
        return
    known = set(map(id, parameters))
    if any(id(parameter) in known for held in (wrapper, module) if held is not None for parameter in held.parameters()):
        _refuse_wrapper(kind, f"{kind}(...) around the model")


def _wrapper_of(module: nn.Module) -> str | None:
    """Return the name of torch's wrapper class; None for another module, or if ``real.attach`` has switched it off."""
    kind = _torch_class(module, WRAPPERS)
    return None if kind is not None and getattr(module, "exchanges_nothing", False) else kind


def _torch_class(value: object, names: Collection[str]) -> str | None:
    found = (kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith("torch."))
    return next((name for name in found if name in names), None)


def _refuse_wrapper(kind: str, where: str) -> NoReturn:
    what = "exchanges gradients or shards parameters by itself, and together with fleet's exchange gradients are wrong"
    hint = (
        "give fleet.distributed_model the plain module (`ddp.module`), and call that one in the loop; arguments such as "
        "static_graph are fields of the strategy; "
        "Hugging Face's Trainer and Accelerate wrap the model by themselves: write the loop without them"
    )
    raise ConfigError(what, where, kind, hint)


def refuse_optimizer(optimizer: object, what: Combination) -> None:
    """Raise ``ConfigError`` if steps of ``optimizer`` cannot be followed, or conflict with the strategy.

    A ZeroRedundancyOptimizer shares out updates by itself, and needs gradients that are averaged in every step.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        why = "is no torch.optim.Optimizer, or does not call Optimizer.__init__: its steps are not heard"
        hint = "give fleet.distributed_optimizer the optimizer inside, and go on stepping the wrapper"
        if _torch_class(optimizer, {"PostLocalSGDOptimizer"}):
            hint = 'use the optimizer inside alone, and let the strategy average parameters: localsgd with schedule = "torch"'
        raise ConfigError(why, "the optimizer", kind, hint)
    if not what.leaves_averages and _torch_class(optimizer, {"ZeroRedundancyOptimizer"}):
        why = "shares out its updates by itself, and that needs gradients that are averaged in every step"
        hint = "use a plain optimizer, or leave local steps, gradient merge, amp in FP16 and updates by bucket out of the strategy"
        raise ConfigError(why, "the optimizer", kind, hint)


def refuse_other_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], model: nn.Module, *, is_averaged: bool
) -> None:
    """Raise ``ConfigError`` if an optimizer that fleet was not given has made parameters differ between ranks.

    ``is_averaged``: whether the gradients of ``parameters``, which fleet exchanges, are now the same on all ranks.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None}
    strange = [name for name, own in model.named_parameters() if id(own) in held and name not in parameters]
    why = "has stepped parameters that came, or were unfrozen, after fleet.distributed_model: nobody averages their gradients"
    hint = "call fleet.distributed_model(model) again, between two steps, when the model has changed"
    if not strange and not is_averaged:
        strange = [name for name, own in parameters.items() if id(own) in held]
        why = (
            "has stepped parameters of the model, and was not given to fleet, or another has taken its place: "
            "ranks would end with different models"
        )
        hint = (
            "give every optimizer to fleet.distributed_optimizer, also one that replaces another; without local steps, "
            "gradient merge and amp in FP16, others may step after loss.backward(), as under DDP"
        )
    if strange:
        where = f"optimizer {type(optimizer).__name__}"
        raise ConfigError(why, where, f"{len(strange)}: {', '.join(strange[:5])}", hint)


def refuse_max_norm(model: nn.Module, why: str, hint: str) -> None:
    """Raise ``ConfigError`` for a trained embedding with ``max_norm``, whose forward shortens rows that it reads."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None and module.weight.requires_grad:
            raise ConfigError(f"shortens its rows, {why}", f"embedding {name}", f"max_norm={module.max_norm:g}", hint)


def refuse_untrainable(model: object) -> None:
    """Raise ``ConfigError`` for a model that is no module, is scripted, has lazy tensors, or has nothing to train."""
    where, kind = "fleet.distributed_model", type(model).__name__
    if not isinstance(model, nn.Module):
        raise ConfigError("is given what is no torch.nn.Module", where, kind, "give it the module whose forward the loop calls")
    if isinstance(model, RecursiveScriptModule):
        hint = "give it the plain module, or one whose forward calls the scripted one, such as torch.nn.Sequential(scripted)"
        raise ConfigError("is given a scripted module, which takes no hooks", where, kind, hint)
    lazy = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        what = "has no shape yet: its lazy module makes it in the first forward"
        hint = "run a batch through the model (under torch.no_grad()) before fleet.distributed_model, and make the optimizer after that"
        raise ConfigError(what, lazy[0], f"{len(lazy)} such", hint)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        hint = "unfreeze what is to be trained (requires_grad = True) before it; an evaluation needs no fleet"
        raise ConfigError("is given a model without parameters to train", where, kind, hint)


def refuse_model(model: nn.Module, device: torch.device, strategy: DistributedStrategy | None = None) -> None:
    """Raise ``ConfigError`` for a model that no engine can train on this device, or a ``strategy`` that shards."""
    if strategy is not None and strategy.sharding:
        hint = "write fleet's four lines into the script, or fully_shard itself"
        raise ConfigError("is executed in experiments, and in scripts with fleet's four lines", "strategy.sharding", "true", hint)
    refuse_untrainable(model)
    refuse_wrappers(model)
    refuse_max_norm(model, "each rank those that its batch reads", "leave max_norm out, or clip the weight after optimizer.step()")
    refuse_misplaced(model, device)


def refuse_graph_of_gradients(exchanges: bool) -> None:
    """Raise ``ConfigError`` in a backward with ``create_graph=True`` whose gradients are exchanged in buckets."""
    if exchanges and torch.is_grad_enabled():
        hint = "take the inner gradient by torch.autograd.grad(..., create_graph=True), and call backward() on the loss that uses it"
        raise ConfigError("keeps the graph of gradients that are averaged in buckets", "loss.backward(create_graph=True)", hint=hint)


def refuse_misplaced(model: nn.Module, device: torch.device) -> None:
    """Raise ``ConfigError`` for a model that is not on one device, of the type on which trainers communicate."""
    places = sorted({str(tensor.device) for tensor in (*model.parameters(), *model.buffers())})
    hint = f"call model.to({device.type!r}) before fleet.distributed_model"
    if len(places) > 1:
        raise ConfigError("lies on several devices, and a trainer has one", "the model", ", ".join(places), hint)
    if torch.device(places[0]).type != device.type:
        raise ConfigError(f"is on {places[0]}, and its trainers meet on {device.type}", "the model", hint=hint)


def refuse_sparse(sparse: Collection[str], what: Combination) -> None:
    """Raise ``ConfigError`` for sparse gradients that the strategy would gather in a flat buffer."""
    if sparse and what.is_local and (what.merges or what.fuses_update):
        hint = "build the embedding with sparse=False, or drop gradient_merge and fuse_all_optimizer_ops"
        where = f"parameters {', '.join(sorted(sparse)[:3])}"
        raise ConfigError("has sparse gradients, which Local SGD neither merges nor updates as one", where, hint=hint)


def one_number(loss: torch.Tensor | float) -> torch.Tensor:
    """Return the reported loss, detached. Raises ``ConfigError`` unless it is a single number."""
    told = loss.detach() if isinstance(loss, torch.Tensor) else torch.as_tensor(loss, dtype=torch.float64, device="cpu")
    if told.numel() != 1:
        shown = f"a tensor of shape {list(told.shape)}"
        raise ConfigError("the loss is one number", "fleet.report(loss=...)", shown, "report loss.mean()")
    return told


def refuse_scaler(what: Combination) -> None:
    """Raise ``ConfigError`` if the script's own GradScaler calls ``optimizer.step()`` and cannot work as under DDP."""
    if what.leaves_averages or not _is_stepped_by_scaler():
        return
    fields = "gradient_merge, amp, Local SGD or enable_backward_optimizer_op_deps = false"
    why = f"with {fields} it would not leave out the update that it leaves out under DDP"
    hint = "take the GradScaler out of the script: with amp = true the strategy scales, and all trainers skip an overflow together"
    raise ConfigError(f"is called by a GradScaler of the script's own, and {why}", "optimizer.step()", hint=hint)


def refuse_again(what: Combination, *, is_attached: bool, dropped: bool) -> None:
    """Raise ``ConfigError`` if a second backward before ``optimizer.step()`` cannot give the same gradients as in DDP.

    ``is_attached``: whether fleet knows the optimizer. ``dropped``: whether the first backward's gradients were
    cleared. If gradients are averaged, all trainers clear them alike; a trainer with gradients of its own would count
    fewer updates.
    """
    inputs = "; gradients of inputs alone, as for adversarial examples, are torch.autograd.grad(loss, x) or loss.backward(inputs=[x])"
    accumulate = (
        "put every backward of a step but the last into `with fleet.no_sync():`; "
        "a GradScaler of the script's own, which leaves out optimizer.step() at an overflow, needs amp = true in its place; "
        "where another model is trained through this one, put that backward into `with model.no_sync():` of this one"
    )
    if what.leaves_averages:
        return
    if not is_attached:
        why = f"fleet does not know the optimizer, whose steps {fields_of(what)} counts"
        hint = (
            "call fleet.distributed_optimizer before training; updates by hand (p -= lr * p.grad) "
            "need gradients that are averaged in every step, or go into a torch.optim.Optimizer of your own"
        )
    elif what.merges or what.updates_by_bucket or what.scales:
        fields = "gradient_merge, enable_backward_optimizer_op_deps = false or amp"
        why, hint = f"{fields} has merged, used or unscaled the first one's gradients already", accumulate + inputs
    elif what.is_local and dropped:
        why = "the first one's gradients were thrown away, and this trainer would count fewer updates than the others"
        hint = f"skip a batch before its backward, and on every trainer; amp = true skips overflows by itself, without a GradScaler{inputs}"
    else:
        return
    raise ConfigError(f"a second backward comes before optimizer.step(), and {why}", "loss.backward()", hint=hint)


def refuse_apart(places: Sequence[int]) -> None:
    """Raise ``ConfigError`` on every rank unless ``places``, the ranks' progress as operation ids, are the same."""
    if len(set(places)) > 1:
        what = "trainers average after different steps, so that their parameters are mixed"
        told = f"operations {', '.join(map(str, places))} of ranks 0 to {len(places) - 1}"
        hint = "every trainer needs as many steps, and calls fleet.synchronize, fleet.end_epoch and what saves after the same step"
        raise ConfigError(what, "strategy.adaptive_localsgd", told, hint)


def _is_stepped_by_scaler() -> bool:
    """Whether an enabled GradScaler is among the callers; unscaling and fused steps leave no other trace."""
    frame = inspect.currentframe()
    while frame is not None:
        scaler = frame.f_locals.get("self") if frame.f_globals.get("__name__") == GradScaler.__module__ else None
        if isinstance(scaler, GradScaler) and scaler.is_enabled():
            return True
        frame = frame.f_back
    return False


def refuse_moved(first: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ``ConfigError`` if the model was moved or converted since its first parameter had this type and device."""
    if first.dtype != dtype or first.device != device:
        what = "was moved or converted after it was distributed"
        hint = "call model.to(...) before fleet.distributed_model"
        raise ConfigError(what, "the model", f"{first.dtype} on {first.device}, before {dtype} on {device}", hint)


def refuse_unfinished(phase: Phase, rank: int) -> None:
    """Raise ``ConfigError`` if a forward begins in the middle of a backward."""
    if phase == Phase.BACKWARD:
        hint = "after an exception in a backward trainers are at different places: end the script, and go on from a checkpoint"
        raise ConfigError("the last backward did not come to its end", f"rank {rank}", hint=hint)


def refuse_late() -> NoReturn:
    """Raise ``ConfigError`` for a backward whose forward read parameters that have been replaced since."""
    what = "its forward read parameters that trainers have averaged or loaded anew since"
    hint = "call fleet.synchronize, fleet.end_epoch and loads before a step's forward, or after its optimizer.step()"
    raise ConfigError(what, "loss.backward()", hint=hint)


def refuse_missing(reducer: PlannedReducer, plan: Plan, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ``ConfigError`` if a backward has not left a gradient for every parameter, and the Reducer needs it."""
    if (missing := reducer.missing) is None:
        return
    names = [name for bucket in plan.buckets for name in bucket.gradients]
    _refuse_unused(sorted(names[index] for index in missing), parameters)


def _refuse_unused(unused: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> NoReturn:
    frozen = [name for name in unused if not parameters[name].requires_grad]
    what = "got no gradient in this step"
    hint = "let the loss reach every parameter, set requires_grad = False on those before fleet.distributed_model"
    if frozen:
        what = "was frozen (requires_grad = False) after fleet.distributed_model, and gets no gradient any more"
        hint = "call fleet.distributed_model(model) again, between two steps"
    shown = ", ".join((frozen or unused)[:5])
    hint += ", or set strategy.find_unused_parameters = true, or static_graph = true if no step uses them"
    raise ConfigError(what, f"parameters {shown}", f"{len(frozen or unused)} of {len(parameters)}", hint)


def refuse_frozen(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ``ConfigError`` if any of the parameters, all of which need a gradient, has been frozen."""
    if frozen := sorted(name for name, parameter in parameters.items() if not parameter.requires_grad):
        _refuse_unused(frozen, parameters)


def refuse_unfrozen(frozen: Mapping[str, nn.Parameter]) -> None:
    """Raise ``ConfigError`` if a parameter that was frozen when the model was distributed now requires gradients."""
    if unfrozen := [name for name, parameter in frozen.items() if parameter.requires_grad]:
        what = "requires gradients (requires_grad = True) since fleet.distributed_model, and nobody averages them"
        hint = (
            "call fleet.distributed_model(model) again, between two steps; or let all that is ever trained require gradients before it, "
            "and leave it out of the optimizer until optimizer.add_param_group(...)"
        )
        raise ConfigError(what, f"parameters {', '.join(unfrozen[:5])}", f"{len(unfrozen)} of {len(frozen)} frozen ones", hint)


def fields_of(what: Combination) -> str:
    """Return the fields by which an update is more than a step of optimizers on averaged gradients."""
    named = {
        "localsgd": what.is_local and what.adaptive is None,
        "adaptive_localsgd": what.adaptive is not None,
        "gradient_merge": what.merges,
        "amp in FP16": what.scales,
        "build_strategy.enable_backward_optimizer_op_deps = false": what.updates_by_bucket,
    }
    return " with ".join(name for name, is_set in named.items() if is_set)


def given_of(arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of ``optimizer.step`` that are not None."""
    return [item for item in (*arguments[1:], *named.values()) if item is not None]


def refuse_arguments(given: Sequence[Any], what: Combination | None = None) -> None:
    """Raise ``ConfigError`` for arguments of ``optimizer.step``, such as a closure, if they would come too late.

    ``what``: None with parameter servers, which take the gradients when it is called. Otherwise the strategy may begin
    the update before the call.
    """
    if what is None:
        why = "parameter servers take the gradients when it is called"
    elif not what.leaves_averages:
        why = f"{fields_of(what)} decides what it does when the step's backward has ended, before it is called"
    elif what.fuses_update:
        why = "build_strategy.fuse_all_optimizer_ops chooses how to update from the gradients, before a closure makes them"
    else:
        return
    if given:
        hint = "call loss.backward() and then optimizer.step(); set what else it needs on the optimizer or its groups"
        shown = "a closure" if callable(given[0]) else type(given[0]).__name__
        raise ConfigError(f"must be called without arguments: {why}", "optimizer.step()", shown, hint)


def refuse_update(phase: Phase, members: Sequence[nn.Parameter], model: nn.Module) -> None:
    """Raise ``ConfigError`` if an optimizer's step would not be the strategy's update."""
    if phase == Phase.KEPT:
        what = "the gradients are this trainer's alone: the last backward of this step was inside no_sync"
        hint = "leave fleet.no_sync() before the last backward of a step"
        raise ConfigError(what, "optimizer.step()", hint=hint)
    if phase in (Phase.FORWARD, Phase.BACKWARD):
        raise ConfigError("the optimizer steps before a backward has ended", "optimizer.step()", hint="call loss.backward() first")
    if phase == Phase.IDLE and any(parameter.grad is not None for parameter in members):
        raise ConfigError("no backward has come since the last step", "optimizer.step()", hint=_way_out(model))


def refuse_nonlinear(strategy: DistributedStrategy, optimizer: torch.optim.Optimizer) -> None:
    """Raise ``ConfigError`` if averaging parameters after each update differs from a step on averaged gradients."""
    if strategy.needs_linear_optimizer and not isinstance(optimizer, torch.optim.SGD):
        what = "averaging parameters after every update (k_steps = 1) is not a step of averages for this optimizer"
        hint = 'use torch.optim.SGD, raise k_steps, or set optimizer_state = "average"'
        raise ConfigError(what, "fleet.distributed_optimizer", type(optimizer).__name__, hint)


def refuse_in_step(phase: Phase, where: str) -> None:
    """Raise ``ConfigError`` if ``where`` is called within a step rather than between two."""
    if phase != Phase.IDLE:
        way = "skip its backward, or run that inside fleet.no_sync() and clear the gradients"
        hint = f"call it after optimizer.step(); to leave a batch out, {way}"
        raise ConfigError("comes in the middle of a step", where, hint=hint)


def refuse_open(has_agreed: bool, merged: int, where: str) -> None:
    """Raise ``ConfigError`` if ``where`` is called in the middle of a round of local steps or of a gradient merge."""
    if not has_agreed:
        what, hint = "comes in the middle of a round of local steps", "call fleet.synchronize() on every trainer before it"
        raise ConfigError(what, where, hint=hint)
    if merged:
        what, hint = "comes while gradients wait for more before their update", "call it after the k-th batch of a gradient merge"
        raise ConfigError(what, where, f"{merged} merged", hint)


def refuse_uneven(what: Combination, strategy: DistributedStrategy, where: str) -> None:
    """Raise ``ConfigError`` if trainers without data could not take part in the others' exchanges."""
    if not what.leaves_averages:
        why = "needs gradients that are averaged in every backward"
        hint = "give every trainer as many batches: DistributedSampler does so, with or without drop_last"
        raise ConfigError(why, where, "local steps, gradient merge, amp in FP16 or updates by bucket", hint)
    if what.is_static:
        hint = "set static_graph = false, or give every trainer as many batches"
        raise ConfigError("cannot take part in the first backward, which counts gradients", where, "static_graph = true", hint)
    if strategy.sync_batch_norm:
        hint = "set sync_batch_norm = false, or give every trainer as many batches"
        raise ConfigError("cannot take part in the forwards of synchronised batch norms", where, "sync_batch_norm = true", hint)


def _way_out(model: nn.Module) -> str:
    if not model.training:
        return "call model.train() before training"
    return "call model(...) itself, not one of its parts, and then the backward, before the next optimizer.step()"
