"""Misuse: what a script must not do is refused in words, before ranks drift apart."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zero_trainer import ZeroTrainer, engine_of, six_layers, train

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.collective import Collective
from real.compute.recompute import apply_recompute
from real.compute.sync_batch_norm import apply_sync_batch_norm
from real.engine.engine import Engine
from real.models import Models
from real.servers.served import Served


class Stranger(ZeroTrainer):
    """This process is rank 1; rank 0 has gathered the same as ours ``alike`` times, and then zeros: what is not ours."""

    rank = 1

    def __init__(self, alike: int) -> None:
        super().__init__()
        self._alike = alike

    def all_gather(self, whole: torch.Tensor, own: torch.Tensor, group: str, communicator: int) -> None:
        """What all ranks have."""
        super().all_gather(whole, own, group, communicator)
        if own.dtype == torch.uint8 and len(own) == 64:  # a digest
            self._alike -= 1
        if self._alike < 0:
            whole[: len(own)] = ord("0") if own.dtype == torch.uint8 else own


MERGE = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
BY_BUCKET = {"build_strategy": {"enable_backward_optimizer_op_deps": False}}
SCALED = {"amp": True}
SECOND = "a second backward comes before optimizer.step"


@pytest.mark.parametrize("fields", [MERGE, BY_BUCKET, SCALED, {"localsgd": True, **SCALED}])
def test_a_second_backward_that_cannot_be_right_is_refused(others: ZeroTrainer, fields: dict[str, object]) -> None:
    """Where the first backward has done more than to leave averages in ``.grad``, the second one says so, and what to do."""
    model = six_layers()
    engine, _ = engine_of(model, others, **fields)
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ConfigError, match=f"{SECOND}.*has merged, used or unscaled") as caught:
        model(torch.ones(2, 8)).sum().backward()
    assert caught.value.hint is not None
    assert "fleet.no_sync()" in caught.value.hint
    engine.close()


LOCAL = {"localsgd": True, "localsgd_configs": {"k_steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}}
INPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "grad": lambda loss, x: setattr(x, "grad", *torch.autograd.grad(loss, x)),
    "inputs": lambda loss, x: loss.backward(inputs=[x]),  # type: ignore[no-untyped-call]
    "all": lambda loss, _: loss.backward(),  # type: ignore[no-untyped-call]
}


@pytest.mark.parametrize("fields", [{}, LOCAL, MERGE, BY_BUCKET, SCALED], ids=["synchronous", "local", "merge", "by bucket", "scaled"])
def test_a_backward_to_the_inputs_is_none_of_the_strategy_s_or_is_named(others: ZeroTrainer, fields: dict[str, object]) -> None:
    """Adversarial examples: gradients of inputs alone count as nothing; all gradients do, and the error says how to take the inputs'."""

    def train_on_adversarial_examples(kind: str) -> torch.Tensor:
        torch.manual_seed(2)
        engine, optimizer = engine_of(six_layers(), others, **fields)
        try:
            for _ in range(4):
                x = torch.randn(2, 8, requires_grad=True)
                INPUTS[kind](engine.model(x).sum(), x)
                optimizer.zero_grad()
                assert x.grad is not None
                engine.model((x + x.grad.sign()).detach()).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            return torch.cat([value.detach().flatten() for value in engine.model.parameters()])
        finally:
            engine.close()

    expected = train_on_adversarial_examples("grad")
    assert torch.equal(train_on_adversarial_examples("inputs"), expected)
    if not fields:
        assert torch.equal(train_on_adversarial_examples("all"), expected)
        return
    with pytest.raises(ConfigError, match=SECOND) as caught:
        train_on_adversarial_examples("all")
    assert "loss.backward(inputs=[x])" in str(caught.value.hint)


def test_a_second_backward_of_one_graph_is_refused_by_its_name(others: ZeroTrainer) -> None:
    """Where updates have changed what the graph has saved, the error is that of a second backward, and not autograd's."""
    model = six_layers()
    engine, optimizer = engine_of(model, others, **BY_BUCKET)
    train(engine, optimizer, 3)
    output = model(torch.ones(2, 8))
    output.sum().backward(retain_graph=True)
    with pytest.raises(ConfigError, match=SECOND):
        output.square().sum().backward()
    engine.close()


def test_a_second_backward_without_an_optimizer_is_refused(others: ZeroTrainer) -> None:
    """A merge would accumulate for ever in a loop that has not handed over its optimizer."""
    model = six_layers()
    engine = Engine(model, DistributedStrategy.from_dict(MERGE), others)  # type: ignore[arg-type]  # the fake has the methods that the engine calls
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ConfigError, match="fleet does not know the optimizer"):
        model(torch.ones(2, 8)).sum().backward()
    engine.close()


def test_a_sparse_gradient_from_elsewhere_is_refused_by_name(others: ZeroTrainer) -> None:
    """A sparse gradient of something that is no embedding is named instead of being summed wrongly."""

    class Looked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(5, 3))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(rows, self.table, sparse=True)

    model = Looked()
    engine, _ = engine_of(model, others)
    with pytest.raises(ConfigError, match="parameter table: has a sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()
    engine.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_that_the_loop_leaves_out_is_noticed(others: ZeroTrainer, *, set_to_none: bool) -> None:
    """``continue`` between a backward of Local SGD and its ``optimizer.step()`` is one rank's decision: the next backward says so."""
    engine, optimizer = engine_of(six_layers(), others, localsgd=True, localsgd_configs={"k_steps": 4})
    train(engine, optimizer, 3)
    engine.model(torch.ones(2, 8)).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    with pytest.raises(ConfigError, match=f"{SECOND}.*were thrown away"):
        engine.model(torch.ones(2, 8)).sum().backward()
    engine.close()


@pytest.mark.parametrize("fields", [{}, {"localsgd": True}, MERGE, BY_BUCKET, SCALED])
def test_an_update_from_this_rank_s_gradients_alone_is_refused(others: ZeroTrainer, fields: dict[str, object]) -> None:
    """``optimizer.step()`` after nothing but backwards inside ``no_sync`` would let ranks drift apart."""
    engine, optimizer = engine_of(six_layers(), others, **fields)
    with engine.no_sync():
        engine.model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ConfigError, match=r"the last backward of this step was inside no_sync"):
        optimizer.step()
    with pytest.raises(ConfigError, match=r"in the middle of a step"):
        engine.progress("fleet.save_persistables")
    engine.close()


@pytest.mark.parametrize("fields", [{}, {"localsgd": True, "localsgd_configs": {"k_steps": 4}}])
@pytest.mark.parametrize("steps", [0, 3])
def test_training_in_evaluation_mode_counts_as_training(others: ZeroTrainer, fields: dict[str, object], steps: int) -> None:
    """Fine-tuning with dropout off is training: as many steps and the same parameters as in training mode."""
    found = []
    for trains in (True, False):
        torch.manual_seed(0)
        engine, optimizer = engine_of(six_layers(), others, **fields)
        train(engine, optimizer, steps)
        engine.model.train(trains)
        train(engine, optimizer, 2)
        assert engine.step == steps + 2
        found.append([parameter.detach().clone() for parameter in engine.model.parameters()])
        engine.close()
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("fields", [BY_BUCKET, {"localsgd": True}, MERGE])
def test_a_closure_is_refused(others: ZeroTrainer, fields: dict[str, object]) -> None:
    """Where a step is more than what the optimizer makes of averages: it is not called; and ``step`` takes nothing else either."""
    engine, optimizer = engine_of(six_layers(), others, **fields)
    engine.model(torch.ones(2, 8)).sum().backward()
    for given in (lambda: pytest.fail("it was called"), 1.0):
        with pytest.raises(ConfigError, match="must be called without arguments"):
            optimizer.step(given)  # type: ignore[arg-type]  # that is the point
    engine.close()


def test_parameters_that_nobody_averages_are_refused(others: ZeroTrainer) -> None:
    """An optimizer that holds more than the distributed model's parameters is an error with their number."""
    model = six_layers()
    engine = Engine(model, DistributedStrategy(), others)  # type: ignore[arg-type]  # see above
    with pytest.raises(ConfigError, match=r"1, the first of shape \[3\]"):
        engine.attach_optimizer(torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1))
    engine.close()


def test_a_layer_unfrozen_later_is_refused(others: ZeroTrainer) -> None:
    """Frozen parameters may lie in the optimizer; once they are trained, nobody would average them."""
    model = six_layers()
    model[0].requires_grad_(False)  # torch's signature
    engine, optimizer = engine_of(model, others)
    train(engine, optimizer, 2)
    model[0].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"parameters 0.weight, 0.bias: requires gradients"):
        train(engine, optimizer, 1)
    engine.close()


def test_a_loss_must_be_told_at_every_averaging(others: ZeroTrainer) -> None:
    """Adaptive steps do not go on with a loss of long ago."""
    model = six_layers()
    fields = {"adaptive_localsgd": True, "adaptive_localsgd_configs": {"init_k_steps": 1}}
    engine = Engine(model, DistributedStrategy.from_dict(fields), others)  # type: ignore[arg-type]  # see above
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    for told in (True, False):
        loss = model(torch.ones(2, 8)).square().mean()
        if told:
            engine.report(loss)
        loss.backward()
        if told:
            optimizer.step()
        else:
            with pytest.raises(ConfigError, match=r"which was not reported"):
                optimizer.step()
        optimizer.zero_grad()
    engine.close()


def test_meeting_in_the_middle_of_a_step_is_refused(others: ZeroTrainer) -> None:
    """``fleet.synchronize()`` between a backward and its update would agree on parameters that are about to move."""
    engine, _ = engine_of(six_layers(), others, localsgd=True)
    engine.model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(ConfigError, match="in the middle of a step"):
        engine.flush()
    engine.close()


@pytest.mark.parametrize("k_steps", [None, 4])
def test_a_backward_after_an_averaging_is_refused(others: ZeroTrainer, k_steps: int | None) -> None:
    """Trainers may agree between a forward and its backward if that moves no parameter."""
    fields = {"localsgd": True, "localsgd_configs": {"k_steps": k_steps}} if k_steps else {}
    engine, optimizer = engine_of(six_layers(), others, **fields)
    train(engine, optimizer, 3)
    loss = engine.model(torch.ones(2, 8)).sum()
    engine.flush()
    if k_steps is None:
        loss.backward()
        optimizer.step()
    else:
        with pytest.raises(ConfigError, match="its forward read parameters"):
            loss.backward()
    engine.close()


@pytest.mark.parametrize("phase", ["forward", "kept", "update"])
def test_a_step_that_came_to_nothing_may_be_saved_and_loaded_over(others: ZeroTrainer, phase: str) -> None:
    """After a loss that is no number, a script saves what was before it, or loads that, and trains on."""
    engine, optimizer = engine_of(six_layers(), others)
    train(engine, optimizer, 3)
    saved, carried = engine.progress("a save"), engine.executor.carried()
    train(engine, optimizer, 2)
    with engine.no_sync() if phase == "kept" else nullcontext():
        loss = engine.model(torch.ones(2, 8)).sum() * torch.nan
        if phase != "forward":
            loss.backward()
    if phase == "kept":
        with pytest.raises(ConfigError, match="in the middle of a step"):
            engine.progress("a save")
        optimizer.zero_grad()
    assert engine.progress("a save").state.next_step == 6
    engine.resume(saved, carried, "a load")
    if phase == "forward":
        with pytest.raises(ConfigError, match="its forward read parameters"):
            loss.backward()
    train(engine, optimizer, 2)
    assert (engine.step, engine.num_updates) == (5, 5)
    engine.close()


@pytest.mark.parametrize(("alike", "where"), [(0, "the strategy"), (1, "the model"), (2, "the plan of exchanges")])
def test_a_rank_with_another_strategy_or_model_is_refused(alike: int, where: str) -> None:
    """What is not rank 0's would mix up communicators or tensors: every rank says so before there is any of them."""
    stranger = Stranger(alike)
    with pytest.raises(ConfigError, match=rf"{where}: differs between rank 0 and rank 1 \(got 0+ on rank 0, "):
        engine_of(six_layers(), stranger, nccl_comm_num=2)
    assert not stranger.flights
    stranger.close()


def test_a_group_added_later_is_looked_at(others: ZeroTrainer) -> None:
    """``add_param_group`` with what nobody averages is refused at the next step; with the model's own parameters it is not."""
    model = six_layers()
    engine = Engine(model, DistributedStrategy(), others)  # type: ignore[arg-type]  # the fake has the methods that the engine calls
    *most, last = model.parameters()
    optimizer = torch.optim.SGD(most, lr=0.1)
    engine.attach_optimizer(optimizer)
    train(engine, optimizer, 2)
    optimizer.add_param_group({"params": [last]})
    train(engine, optimizer, 1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ConfigError, match=r"1, the first of shape \[3\]"):
        train(engine, optimizer, 1)
    engine.close()


@pytest.mark.parametrize("change", ["clip", "replace", "drop", "scale", "negate", "unscale"])
def test_gradients_changed_behind_an_update_by_bucket_are_refused(others: ZeroTrainer, change: str) -> None:
    """The update has happened in the backward; a clipping that comes later would be lost without a word."""
    model = six_layers()
    engine, optimizer = engine_of(model, others, build_strategy={"enable_backward_optimizer_op_deps": False})
    train(engine, optimizer, 3)
    model(torch.ones(2, 8)).sum().backward()
    weight = next(model.parameters())
    assert weight.grad is not None
    weight.grad.norm()
    if change == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    elif change == "scale":
        weight.grad.data.mul_(0.5)
    elif change == "negate":
        weight.grad.data.neg_()
    elif change == "unscale":  # as torch's GradScaler does it
        torch._amp_foreach_non_finite_check_and_unscale_([weight.grad], torch.zeros(1), torch.full((1,), 0.5))
    else:
        weight.grad = weight.grad.clone() if change == "replace" else None
    with pytest.raises(ConfigError, match="has updated the parameters already"):
        optimizer.step()
    engine.close()


@pytest.mark.parametrize("fields", [{}, MERGE, {"localsgd": True}])
def test_a_gradient_taken_away_before_a_fused_update_leaves_its_parameter(others: ZeroTrainer, fields: dict[str, object]) -> None:
    """A parameter without gradient stays where it is, as under DDP; the others move."""
    model = six_layers()
    engine, optimizer = engine_of(model, others, build_strategy={"fuse_all_optimizer_ops": True}, **fields)
    train(engine, optimizer, 5 if fields == MERGE else 4)  # the next step is one that updates
    model(torch.ones(2, 8)).sum().backward()
    first, second, *_ = model.parameters()
    before = first.detach().clone(), second.detach().clone()
    first.grad = None
    optimizer.step()
    assert torch.equal(first, before[0])
    assert not torch.equal(second, before[1])
    engine.close()


SCALERS_REFUSED: list[dict[str, Any]] = [
    BY_BUCKET,
    MERGE,
    {**SCALED, "amp_configs": {"init_loss_scaling": 1.0}},
    {"localsgd": True},
    {"localsgd": True, **MERGE},
]


@pytest.mark.parametrize("kind", [torch.optim.SGD, partial(torch.optim.Adam, fused=True)], ids=["SGD", "fused Adam"])
@pytest.mark.parametrize("fields", SCALERS_REFUSED)
def test_a_scaler_of_the_script_s_own_is_refused(others: ZeroTrainer, kind: Any, fields: dict[str, Any]) -> None:
    """Where it would not do what it does under DDP, its first step says so; a scaler that is switched off is none."""
    model = six_layers()
    averaged = {"localsgd_configs": {"optimizer_state": "average"}} if "localsgd" in fields else {}
    engine = Engine(model, DistributedStrategy.from_dict({**fields, **averaged}), others)  # type: ignore[arg-type]  # see above
    optimizer = kind(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    for enabled in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, enabled=enabled)
        scaler.scale(model(torch.ones(2, 8)).sum()).backward()
        with pytest.raises(ConfigError, match="GradScaler of the script's own") if enabled else nullcontext():
            scaler.step(optimizer)
        optimizer.zero_grad()
    engine.close()


@pytest.mark.parametrize("fields", SCALERS_REFUSED)
def test_a_scaler_that_leaves_out_its_first_step_is_refused(others: ZeroTrainer, fields: dict[str, Any]) -> None:
    """A trainer whose first batch overflows is told of the scaler as well, at its second backward."""
    model = six_layers()
    engine = Engine(model, DistributedStrategy.from_dict(fields), others)  # type: ignore[arg-type]  # see above
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine.attach_optimizer(optimizer)
    scaler = torch.amp.GradScaler("cpu")

    def overflow() -> None:
        scaler.scale(engine.model(torch.ones(2, 8)).sum() * torch.inf).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    overflow()
    with pytest.raises(ConfigError) as caught:
        overflow()
    assert caught.value.hint is not None
    assert "GradScaler" in caught.value.hint
    engine.close()


@pytest.mark.parametrize("what", ["parameter", "buffer"])
def test_a_model_on_two_devices_is_refused(others: ZeroTrainer, what: str) -> None:
    """A trainer has one device; the error names those that the model lies on."""
    model = six_layers()
    if what == "parameter":
        model.append(nn.Linear(8, 8, device="meta"))  # type: ignore[operator]  # it is a Sequential
    else:
        model.register_buffer("table", torch.ones(2, device="meta"))
    with pytest.raises(ConfigError, match=r"several devices.*cpu, meta"):
        engine_of(model, others)


def test_models_on_different_kinds_of_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On gloo, where a trainer's tensors are wherever its model is; the error has every rank's."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    trainer = Collective.__new__(Collective)
    trainer._backend = "gloo"
    trainer.meeting = SimpleNamespace(texts=lambda own: [own, "cuda"])  # type: ignore[assignment]  # asked for that alone
    with pytest.raises(ConfigError, match=r"another kind of device.*cpu, cuda"):
        trainer._follow(torch.device("cpu"))


def test_a_model_converted_later_is_refused(others: ZeroTrainer) -> None:
    """``model.double()`` after ``distributed_model``: the next forward says what came too late."""
    model = six_layers()
    engine, optimizer = engine_of(model, others)
    train(engine, optimizer, 2)
    model.double()
    with pytest.raises(ConfigError, match="moved or converted after it was distributed"):
        model(torch.ones(2, 8, dtype=torch.float64))
    engine.close()


@pytest.mark.parametrize(
    ("called", "match"), [("is_auto", "strategy.auto: is looked up for one model"), ("is_driven", "is called again, and a profile")]
)
def test_a_second_model_where_one_is_followed_is_refused(others: ZeroTrainer, called: str, match: str) -> None:
    """A recommendation is for one model, and a profile or a tuning follows one."""
    models = Models()
    engine, _ = engine_of(six_layers(), others)
    models.put(engine)
    with pytest.raises(ConfigError, match=match):
        models.refuse_another(six_layers(), **{"is_auto": False, "is_driven": False, called: True})
    engine.close()


def test_a_loss_is_one_number(others: ZeroTrainer) -> None:
    """A float and a tensor of one element are told; a batch of losses is refused where it is reported."""
    engine, _ = engine_of(six_layers(), others)
    for loss in (0.5, torch.tensor([0.5]), torch.tensor(0.5)):
        engine.report(loss)
        assert engine.executor.loss is not None
        assert engine.executor.loss.item() == 0.5
    with pytest.raises(ConfigError, match=r"one number \(got a tensor of shape \[8\]\)"):
        engine.report(torch.ones(8))
    engine.close()


def test_an_optimizer_that_needs_a_closure_is_refused_at_once(others: ZeroTrainer) -> None:
    """LBFGS updates all parameters as one, as often as it likes: where gradients are not averaged every time, no strategy can step it."""
    model = six_layers()
    engine = Engine(model, DistributedStrategy.from_dict(MERGE), others)  # type: ignore[arg-type]  # see above
    with pytest.raises(ConfigError, match="LBFGS"):
        engine.attach_optimizer(torch.optim.LBFGS(model.parameters()))
    engine.close()


class Frozen(nn.Linear):
    """Nothing to train."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.requires_grad_(requires_grad=False)


UNTRAINABLE: dict[str, tuple[Callable[[], object], str]] = {
    "no module": (lambda: torch.ones, "no torch.nn.Module .got builtin_function_or_method"),
    "no parameters": (lambda: nn.Sequential(nn.ReLU()), "without parameters to train .got Sequential"),
    "all frozen": (Frozen, "without parameters to train .got Frozen"),
    "lazy": (lambda: nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(2)), r"1.weight: has no shape yet.*got 2 such"),
    "lazy buffers": (lambda: nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(8, 8)), "0.running_mean: has no shape"),
    "scripted": (lambda: torch.jit.script(six_layers()), "a scripted module, which takes no hooks"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")  # and still in use
@pytest.mark.parametrize("strategy", [{}, {"auto": True}, {"mode": "ps", "a_sync": True}], ids=["collective", "auto", "servers"])
@pytest.mark.parametrize("kind", UNTRAINABLE)
def test_what_cannot_be_trained_is_refused(strategy: dict[str, Any], kind: str) -> None:
    """Before anything else is asked of the model."""
    make, what = UNTRAINABLE[kind]
    job = object.__new__(Served if "mode" in strategy else Collective)
    job.__dict__ |= {
        "engine": None,
        "training": None,
        "role": SimpleNamespace(kind="trainer"),
        "_strategy": DistributedStrategy(**strategy),
    }
    with pytest.raises(ConfigError, match=what) as caught:
        job.distributed_model(make())  # type: ignore[arg-type]  # that is the point
    assert caught.value.hint is not None


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")  # and still in use
def test_a_scripted_part_is_trained_as_the_plain_one(others: ZeroTrainer) -> None:
    """The hint's way out gives the same parameters."""
    found = []
    for scripts in (False, True):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))
        engine, optimizer = engine_of(nn.Sequential(torch.jit.script(inner) if scripts else inner), others)
        for _ in range(4):
            engine.model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([value.detach().clone() for value in engine.model.state_dict().values()])
        engine.close()
    torch.testing.assert_close(*found)


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated:DeprecationWarning")  # and still in use
@pytest.mark.parametrize(
    "convert", [torch.jit.script, lambda norm: torch.jit.trace(norm.eval(), torch.ones(4, 8))], ids=["scripted", "traced"]
)
def test_a_part_of_torchscript_is_neither_synchronised_nor_computed_again(convert: Callable[[nn.Module], nn.Module]) -> None:
    """Its batch norm has no forward to change, and would move its statistics twice."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(convert(nn.BatchNorm1d(8))))
    with pytest.raises(ConfigError, match=r"recompute_configs.checkpoints: is scripted or traced"):
        apply_recompute(model, ["1"])
    group = dist.ProcessGroup(dist.HashStore(), 0, 2)  # type: ignore[attr-defined]  # missing from __all__ only
    with pytest.raises(ConfigError, match=r"sync_batch_norm: 1.0: a scripted or traced batch norm"):
        apply_sync_batch_norm(model, group)
