"""Flat storage moves parameters' data and nothing else."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from real.engine.flat import FlatParameters, can_flatten, flattenable, is_dense, own_copy, views_of


def _parameters() -> list[nn.Parameter]:
    """Every layout that may be flattened: contiguous, channels_last, transposed, permuted, of one element, without dimension, empty."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return [
        nn.Parameter(random(4, 3)),
        nn.Parameter(random(2, 3, 5, 4).contiguous(memory_format=torch.channels_last)),
        nn.Parameter(random(4, 3).t()),
        nn.Parameter(random(2, 3, 4).permute(1, 2, 0)),
        nn.Parameter(random(3, 1, 1, 2).contiguous(memory_format=torch.channels_last)),
        nn.Parameter(random(1)),
        nn.Parameter(random(1).squeeze()),
        nn.Parameter(random(0, 3)),
    ]


def _in_memory_order(tensor: torch.Tensor) -> list[float]:
    """A dense tensor's elements as they lie in memory, one by one."""
    offsets = torch.zeros(tensor.shape, dtype=torch.int64)
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * tensor.dim()
        shape[dimension] = size
        offsets = offsets + (torch.arange(size) * stride).reshape(shape)
    pairs = zip(offsets.reshape(-1).tolist(), tensor.detach().reshape(-1).tolist(), strict=True)
    return [value for _, value in sorted(pairs)]


def _saved_bytes(tensor: torch.Tensor) -> int:
    file = io.BytesIO()
    torch.save(tensor, file)
    return len(file.getvalue())


def test_the_buffer_holds_every_parameter_in_its_own_memory_order() -> None:
    """Values, shapes, strides and identity stay; the buffer is the parameters' memory laid end to end; writes show on both sides."""
    parameters = _parameters()
    before = [(parameter.detach().clone(), parameter.stride()) for parameter in parameters]
    expected = [value for parameter in parameters for value in _in_memory_order(parameter)]
    flat = FlatParameters(parameters)
    assert flat.buffer.tolist() == expected
    for parameter, view, (values, strides) in zip(parameters, flat.views, before, strict=True):
        assert torch.equal(parameter, values)
        assert parameter.stride() == strides == view.stride()
    with torch.no_grad():
        flat.buffer.mul_(2)
        assert all(torch.equal(parameter, 2 * values) for parameter, (values, _) in zip(parameters, before, strict=True))
        parameters[1].fill_(7)
    assert flat.buffer[12:132].eq(7).all()
    assert not flat.buffer[:12].eq(7).any()
    assert not flat.buffer[132:].eq(7).any()


def _train(model: nn.Sequential, flatten_at: set[int], release_at: set[int]) -> tuple[list[torch.Tensor], int]:
    """Six steps; returns the parameters and how often a gradient hook fired."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    calls = 0

    def count(_parameter: torch.Tensor) -> None:
        nonlocal calls
        calls += 1

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    generator = torch.Generator().manual_seed(5)
    flat: FlatParameters | None = None
    for step in range(6):
        if step in flatten_at:
            parameters = list(model.parameters())
            flat = FlatParameters(parameters if step % 2 else parameters[::-1])
        if step in release_at and flat is not None:
            flat.release()
        optimizer.zero_grad()
        inputs = torch.randn(4, 3, 8, 8, generator=generator).contiguous(memory_format=torch.channels_last)
        model(inputs).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()], calls


def test_training_does_not_notice() -> None:
    """Flattened, flattened into another order and released between steps, a model trains to the same bits; hooks and momentum live on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    model = model.to(memory_format=torch.channels_last)
    plain, calls = _train(copy.deepcopy(model), set(), set())
    moved, calls_moved = _train(model, {1, 2, 4}, {3, 5})
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
    assert calls == calls_moved == 36


def test_a_released_parameter_is_saved_alone() -> None:
    """Flat, one small parameter saves the whole buffer; released, no more than it did before, with its values and strides."""
    parameters = [*_parameters(), nn.Parameter(torch.zeros(10_000))]
    values = [parameter.detach().clone() for parameter in parameters]
    strides = [parameter.stride() for parameter in parameters]
    sizes = [_saved_bytes(parameter) for parameter in parameters]
    flat = FlatParameters(parameters)
    assert _saved_bytes(parameters[0]) > 40_000
    flat.release()
    assert [_saved_bytes(parameter) for parameter in parameters] == sizes
    assert [parameter.stride() for parameter in parameters] == strides
    flat.buffer.fill_(9)
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, values, strict=True))


def test_parameters_may_move_on_into_another_order() -> None:
    """Flattened again, they live in the new buffers alone, and the old buffer's release leaves them there."""
    parameters = _parameters()
    values = [parameter.detach().clone() for parameter in parameters]
    old = FlatParameters(parameters)
    assert all(flattenable(parameters))
    first, second = FlatParameters(parameters[5:2:-1]), FlatParameters([*parameters[:3], *parameters[6:]])
    assert not old.intact
    assert first.intact
    assert second.intact
    old.release()
    old.buffer.fill_(9)
    assert first.intact
    assert second.intact
    assert all(torch.equal(parameter, value) for parameter, value in zip(parameters, values, strict=True))


@pytest.mark.parametrize("num", [1, 3, 20])
def test_a_parameter_that_left_is_found_within_eight_looks(num: int) -> None:
    """Whichever parameter it is; where all have left, the first look tells."""
    for gone in range(num):
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(num)]
        flat = FlatParameters(parameters)
        assert all(flat.seems_intact() for _ in range(20))
        parameters[gone].data = torch.ones(2)
        assert not all([flat.seems_intact() for _ in range(8)])  # noqa: C419  # every look is taken
        for parameter in parameters:
            parameter.data = torch.ones(2)
        assert not flat.seems_intact()


def test_a_module_that_is_converted_has_left_the_buffer() -> None:
    """``Module.to`` gives parameters storage of another type: the buffer says so, and does not take them back."""
    model = nn.Linear(3, 2)
    flat = FlatParameters(list(model.parameters()))
    assert flat.intact
    model.to(torch.float64)
    assert not flat.intact
    flat.release()
    assert model.weight.dtype == torch.float64


def test_tensors_whose_storage_is_not_their_own_stay() -> None:
    """A view, a tensor with gaps or overlaps, a sparse one, memory of several processes, one without memory: none may move."""
    base = torch.zeros(10)
    shared = nn.Parameter(torch.zeros(3))
    shared.share_memory_()
    refused = [
        nn.Parameter(base[2:7]),
        nn.Parameter(base[:5]),
        nn.Parameter(torch.zeros(6)[::2]),
        nn.Parameter(torch.zeros(1).expand(4)),
        nn.Parameter(torch.zeros(2, 2).to_sparse()),
        nn.Parameter(torch.zeros(3, device="meta")),
        nn.UninitializedParameter(),
        shared,
    ]
    assert [can_flatten(parameter) for parameter in refused] == [False] * len(refused)
    assert [can_flatten(parameter) for parameter in _parameters()] == [True] * len(_parameters())
    assert flattenable(refused) == [False] * len(refused)


def test_parameters_that_share_memory_stay() -> None:
    """Two parameters of one memory, one and its slice, one and a module's buffer: a move would part them. A tied parameter is one."""
    twin = nn.Parameter(torch.zeros(4))
    whole = nn.Parameter(torch.zeros(6))
    buffered = nn.Parameter(torch.zeros(3))
    free = nn.Parameter(torch.zeros(2))
    empty = nn.Parameter(torch.zeros(0))
    parameters = [
        twin,
        nn.Parameter(twin.data),
        whole,
        nn.Parameter(whole.data[3:]),
        buffered,
        free,
        free,
        empty,
        nn.Parameter(torch.zeros(0)),
    ]
    assert flattenable(parameters, [buffered.detach()]) == [False, False, False, False, False, True, True, True, True]
    assert flattenable([buffered]) == [True]
    flat = FlatParameters([free, buffered])
    assert flattenable([free, buffered, nn.Parameter(flat.views[0])]) == [False, True, False]


def test_views_follow_a_slice_of_a_buffer_and_a_parameter_with_gaps() -> None:
    """Views of part of a buffer begin where it begins; a parameter with gaps or overlaps has a contiguous view."""
    buffer = torch.arange(20.0)
    matrix, gaps, repeated = torch.zeros(3, 2).t(), torch.zeros(6)[::2], torch.zeros(1).expand(2, 2)
    views = views_of(buffer[5:18], [matrix, gaps, repeated])
    assert views[0].tolist() == [[5, 7, 9], [6, 8, 10]]
    assert views[1].tolist() == [11, 12, 13]
    assert views[2].tolist() == [[14, 15], [16, 17]]
    views[2].fill_(0)
    assert buffer[14:18].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("shape", "strides", "dense"),
    [((2, 3), (3, 1), True), ((2, 3), (1, 2), True), ((2, 1, 3), (3, 99, 1), True), ((2, 3), (4, 1), False), ((2, 2), (1, 1), False)],
)
def test_dense_means_no_gap_and_no_overlap(shape: tuple[int, ...], strides: tuple[int, ...], dense: bool) -> None:
    """Dense is what fills its memory, whatever the order of dimensions; the stride of a dimension of size 1 says nothing."""
    tensor = torch.arange(300.0).as_strided(shape, strides)
    assert is_dense(tensor) == dense
    copy_of = own_copy(tensor)
    assert torch.equal(copy_of, tensor)
    assert copy_of.untyped_storage().nbytes() == 4 * tensor.numel()
