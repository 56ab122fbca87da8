"""Several optimizers, closures and updates by hand: how steps are counted, met in, timed, saved and tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from alone import AloneMeeting, AloneTrainer
from torch import nn
from zero_trainer import ZeroTrainer, six_layers

from fleetbench.errors import ConfigError
from fleetbench.strategy import DistributedStrategy
from real.checkpoints.saving import load, save
from real.collective import Collective
from real.engine.engine import Engine

ALONE = AloneMeeting()
BY_BUCKET = {"build_strategy": {"enable_backward_optimizer_op_deps": False}}
Engines = Callable[..., tuple[Engine, list[torch.optim.Optimizer]]]


def halves(model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer for each half."""
    held = list(model.parameters())
    return [torch.optim.SGD(held[:6], lr=0.1, momentum=0.9), torch.optim.AdamW(held[6:], lr=0.01)]


@pytest.fixture
def engines(others: ZeroTrainer) -> Iterator[Engines]:
    """Makes engines of six layers and their optimizers, and closes them."""
    made = []

    def make(of: Any = halves, communicators: ZeroTrainer = others, **fields: Any) -> tuple[Engine, list[torch.optim.Optimizer]]:
        torch.manual_seed(0)
        engine = Engine(six_layers(), DistributedStrategy.from_dict(fields), communicators)  # type: ignore[arg-type]  # the fake has what it calls
        made.append(engine)
        optimizers = of(engine.model)
        for optimizer in optimizers:
            engine.attach_optimizer(optimizer)
        return engine, optimizers

    yield make
    for engine in made:
        engine.close()


def backward(engine: Engine, seed: int = 0) -> torch.Tensor:
    """A batch's."""
    loss = engine.model(torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))).square().mean()
    loss.backward()
    return loss


def none(_: nn.Module) -> list[torch.optim.Optimizer]:
    """Fleet is given no optimizer."""
    return []


@pytest.mark.parametrize("way", ["in turn", "by hand", "closures", "all"])
def test_every_backward_with_an_update_is_a_step(engines: Engines, way: str) -> None:
    """By one of the optimizers, by hand, or in closures: the plan settles, and every step is timed with one update."""
    engine, optimizers = engines(none if way == "by hand" else halves)
    steps = []
    engine.on_step = steps.append
    for step in range(6):
        if way == "closures":
            optimizers[step % 2].step(lambda step=step: backward(engine, step))
        else:
            backward(engine, step)
        for optimizer in optimizers if way == "all" else optimizers[step % 2 : 1 + step % 2] if way == "in turn" else ():
            optimizer.step()
        engine.model.zero_grad()
    engine.flush()
    assert steps == [1, 2, 3, 4, 5, 6]
    assert engine.progress("a save").state.next_step == 7
    assert engine.progress("a save").settled
    engine.stopwatch.finish()
    assert [step.record.step for step in engine.stopwatch.steps] == steps


def test_batches_that_add_up_are_one_step(engines: Engines) -> None:
    """Backwards without an update of the optimizer's belong to the step that it makes then."""
    engine, optimizers = engines()
    for step in range(4):
        backward(engine, step)
        if step % 2:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert engine.step == 2


@pytest.mark.parametrize("fields", [{"localsgd": True}, BY_BUCKET])
@pytest.mark.parametrize("where", ["fleet.synchronize", "a save"])
def test_a_meeting_before_all_have_stepped_is_refused(engines: Engines, fields: dict[str, Any], where: str) -> None:
    """By the optimizer that is missing, where they are to step all."""
    engine, (one, _) = engines(**fields)
    backward(engine)
    one.step()
    with pytest.raises(ConfigError, match=r"optimizer AdamW, number 2 of 2 given to fleet: has not stepped"):
        engine.flush() if where == "fleet.synchronize" else engine.progress(where)


@pytest.mark.parametrize("kind", ["clip", "scale"])
def test_gradients_changed_between_two_optimizers_are_refused(engines: Engines, kind: str) -> None:
    """With an update in the backward, the second has used the gradients as they were."""
    engine, (one, two) = engines(**BY_BUCKET)
    for step in range(3):
        backward(engine, step)
        one.step()
        if step < 2:
            one.zero_grad(set_to_none=bool(step))
            two.step()
            engine.model.zero_grad()
    last = list(engine.model.parameters())[-1]
    assert last.grad is not None
    if kind == "clip":
        nn.utils.clip_grad_norm_(engine.model.parameters(), 1e-6)
    else:
        last.grad.data.mul_(0.5)
    with pytest.raises(ConfigError, match="gradients were changed after the backward"):
        two.step()


def test_a_step_after_gradients_from_elsewhere_is_refused(engines: Engines) -> None:
    """Steps may come again on the averages that there are, but not after a backward of a part of the model."""
    engine, optimizers = engines()
    backward(engine)
    for optimizer in (*optimizers, *optimizers):
        optimizer.step()
    engine.model[0](torch.ones(2, 8)).sum().backward()  # type: ignore[index, operator]  # it is a Sequential
    with pytest.raises(ConfigError, match="no backward has come since the last step"):
        optimizers[0].step()


@pytest.mark.parametrize("way", ["in turn", "by hand"])
def test_training_in_evaluation_mode(engines: Engines, others: ZeroTrainer, way: str) -> None:
    """It is as in training mode: the other trainer's gradients are zeros."""
    engine, optimizers = engines(none if way == "by hand" else halves)
    engine.model.eval()
    torch.manual_seed(0)
    plain = six_layers()
    of_plain = halves(plain)
    for step in range(5):
        for model, own in ((engine.model, optimizers), (plain, of_plain)):
            model(torch.randn(2, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                if model is plain:
                    parameter.grad /= others.trainers
                if way == "by hand":
                    parameter.data -= 0.1 * parameter.grad
            if way == "in turn":
                own[step % 2].step()
            model.zero_grad()
    for one, other in zip(engine.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_the_rate_is_scaled_for_each_and_restored(engines: Engines) -> None:
    """Also where the first step's end, in the closure of another, makes a new plan."""
    seen = []
    engine, optimizers = engines(lr_scale=0.5)
    for optimizer in optimizers:
        before = optimizer.param_groups[0]["lr"]

        def closure(optimizer: Any = optimizer) -> torch.Tensor:
            loss = backward(engine)
            seen.append(optimizer.param_groups[0]["lr"])
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]  # torch wants a float, and takes a tensor
        assert optimizer.param_groups[0]["lr"] == before
    assert seen == [0.05, 0.005]


STATES: dict[str, tuple[Any, dict[str, Any]]] = {
    "two": (halves, {}),
    "two, merged": (halves, {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}),
    "two, state averaged": (
        halves,
        {"localsgd": True, "localsgd_configs": {"k_steps": 3, "optimizer_state": "average"}},
    ),
    "by hand": (none, {}),
    "LBFGS": (lambda model: [torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)], {}),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", STATES)
def test_training_goes_on_from_a_save(engines: Engines, tmp_path: Path, name: str) -> None:
    """Bit for bit, as if there had been none."""
    of, fields = STATES[name]

    def train(engine: Engine, optimizers: list[torch.optim.Optimizer], first: int, last: int) -> torch.Tensor:
        for step in range(first, last):

            def closure(step: int = step) -> torch.Tensor:
                engine.model.zero_grad()
                return backward(engine, step)

            if name == "LBFGS":
                optimizers[0].step(closure)  # type: ignore[arg-type]  # torch wants a float, and takes a tensor
                continue
            closure()
            for optimizer in optimizers:
                optimizer.step()
            for parameter in engine.model.parameters() if not optimizers else ():
                assert parameter.grad is not None
                parameter.data -= 0.1 * parameter.grad
            engine.model.zero_grad()
        return torch.cat([parameter.detach().reshape(-1) for parameter in engine.model.parameters()])

    whole = train(*engines(of, AloneTrainer(), **fields), 0, 9)
    saved = engines(of, AloneTrainer(), **fields)
    train(*saved, 0, 5)
    save([saved[0]], ALONE, tmp_path, extra=None)
    engine, optimizers = engines(of, AloneTrainer(), **fields)
    train(engine, optimizers, 3, 5)
    assert load([engine], ALONE, tmp_path, resynchronize=False).step == 5
    assert torch.equal(train(engine, optimizers, 5, 9), whole)


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (lambda model: halves(model)[::-1], "was saved with other optimizers (got saved SGD, AdamW, here AdamW, SGD)"),
        (
            lambda model: halves(model)[:1],
            "was saved with other optimizers (got saved SGD, AdamW, here SGD)",
        ),
        (none, "was saved with other optimizers (got saved SGD, AdamW, here none)"),
    ],
)
def test_other_optimizers_than_those_saved_are_refused(engines: Engines, tmp_path: Path, of: Any, said: str) -> None:
    """By number, and by kind, in the order in which fleet was given them."""
    save([engines(communicators=AloneTrainer())[0]], ALONE, tmp_path, extra=None)
    engine, _ = engines(of, AloneTrainer())
    with pytest.raises(ConfigError) as caught:
        load([engine], ALONE, tmp_path, resynchronize=False)
    assert said in str(caught.value)


def test_a_tuning_has_one_optimizer() -> None:
    """A second one is refused where fleet is given it."""
    job = object.__new__(Collective)
    job.__dict__ |= {
        "models": SimpleNamespace(holding=lambda *_: [SimpleNamespace(optimizers=[object()])]),
        "driven": object(),
        "_strategy": DistributedStrategy(),
    }
    with pytest.raises(ConfigError, match="is neither profiled nor tuned"):
        job.distributed_optimizer(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))
