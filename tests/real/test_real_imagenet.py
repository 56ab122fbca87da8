"""The ImageNet folder: lists, pictures, decoding threads, and equal data for every rank; on JPEGs made here."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fleetbench.errors import ConfigError
from fleetbench.workload import Workload
from fleetbench.workloads.data.data import num_training_samples, prepare
from fleetbench.workloads.data.images import ImageBatches, read_list, training_crop, training_pixels
from fleetbench.workloads.data.reader import Sampler

NUM_TRAIN, NUM_VAL, CLASSES, SIZE = 23, 9, 5, 32
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def _colour(number: int) -> tuple[int, int, int]:
    """The one colour of picture ``number``: told apart after decoding, cropping and mirroring."""
    return 10 * number, 255 - 10 * number, 40 + 5 * number


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder: one-coloured training pictures of different sizes, listed below DIR, and noise to validate, listed below DIR/val."""
    root = tmp_path_factory.mktemp("imagenet")
    for split in ("train", "val"):
        (root / split / "of one").mkdir(parents=True)
    lines = []
    for number in range(NUM_TRAIN):
        path = f"train/of one/{number} é.JPEG"
        Image.new("RGB", (40 + 3 * number, 90 - 2 * number), _colour(number)).save(root / path, "JPEG", quality=95)
        lines.append(f"{path} {number % CLASSES}\n")
    (root / "train.txt").write_text("".join(lines), encoding="utf-8")
    noise = np.random.default_rng(0)
    lines = []
    for number in range(NUM_VAL):
        Image.fromarray(noise.integers(0, 255, (50, 60, 3), dtype=np.uint8)).save(root / f"val/{number}.JPEG", "JPEG")
        lines.append(f"{number}.JPEG\t{(number + 1) % CLASSES}\n\n")
    (root / "val.txt").write_text("".join(lines), encoding="utf-8")
    return root


def _workload(images: Path, **options: Any) -> Workload:
    return Workload(
        model="resnet50",
        model_options={"classes": CLASSES, "width": 4},
        data=f"imagenet:{images}",
        data_options={"image_size": SIZE, **options},
    )


@pytest.fixture(scope="module")
def prepared(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the driver writes for the ranks."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(_workload(images, held_out=4), 0, folder)
    return folder


def _sampler(*, batch_size: int = 2, trainers: int = 3, rank: int = 0, uneven: str = "cut") -> Sampler:
    return Sampler(num_samples=NUM_TRAIN, batch_size=batch_size, trainers=trainers, rank=rank, seed=7, uneven=uneven)


def _reader(prepared: Path, images: Path, sampler: Sampler) -> ImageBatches:
    """One that decodes when it is asked."""
    return ImageBatches(prepared, images, sampler, SIZE, 0, torch.float64)


def _seen(inputs: torch.Tensor) -> list[int]:
    """Numbers of the pictures in a batch, by their colour."""
    colours = np.array([_colour(number) for number in range(NUM_TRAIN)])
    pixels = (inputs.numpy().transpose(0, 2, 3, 1) * DEVIATION + MEAN) * 255
    assert np.ptp(pixels, axis=(1, 2)).max() < 1e-9  # one colour: no border was made up
    distance = np.abs(pixels[:, 0, 0, None, :] - colours).max(axis=2)
    assert distance.min(axis=1).max() < 4  # what JPEG leaves of a colour
    return [int(number) for number in distance.argmin(axis=1)]


@pytest.mark.parametrize("uneven", ["cut", "pad"])
def test_three_ranks_read_what_one_process_reads(uneven: str, prepared: Path, images: Path) -> None:
    """At every step of two epochs the batches of 3 ranks, end to end, are the joint batch; the pictures fit the labels."""
    joint = _reader(prepared, images, _sampler(batch_size=6, trainers=1, uneven=uneven))
    ranks = [_reader(prepared, images, _sampler(rank=rank, uneven=uneven)) for rank in range(3)]
    steps = 3 if uneven == "cut" else 4
    assert _sampler(uneven=uneven).steps_per_epoch == steps
    shown: list[int] = []
    for position in range(2 * steps):
        inputs, labels = joint.batch(position)
        parts = [rank.batch(position) for rank in ranks]
        assert torch.equal(torch.cat([part for part, _ in parts]), inputs)
        assert torch.equal(torch.cat([part for _, part in parts]), labels)
        seen = _seen(inputs)
        assert [number % CLASSES for number in seen] == labels.tolist()
        shown += seen
    counts = [np.bincount(shown[first : first + 6 * steps], minlength=NUM_TRAIN) for first in (0, 6 * steps)]
    for count in counts:
        assert (count.min(), count.max(), count.sum()) == ((0, 1, 18) if uneven == "cut" else (1, 2, 24))
    assert shown[: 6 * steps] != shown[6 * steps :]
    assert num_training_samples(prepared) == NUM_TRAIN


def test_a_training_crop_is_as_published() -> None:
    """Its area is uniform in 8..100 % of the picture where that fits, its ratio in 3/4..4/3, and half are mirrored."""
    crops = [training_crop(0, epoch, 5, 600, 500) for epoch in range(4000)]
    assert all(0 <= crop.left <= 600 - crop.width and 0 <= crop.top <= 500 - crop.height for crop in crops)
    areas = np.array([crop.width * crop.height / 300_000 for crop in crops])
    ratios = np.array([crop.width / crop.height for crop in crops])
    assert 0.078 < areas.min() < 0.09
    assert areas.max() <= 1
    assert 0.74 < ratios.min() < 0.76
    assert 1.32 < ratios.max() < 1.345
    small = areas < 0.5  # these fit at every ratio, so nothing distorts their law
    np.testing.assert_allclose(np.quantile(areas[small], [0.25, 0.5, 0.75]), [0.185, 0.29, 0.395], atol=0.015)
    np.testing.assert_allclose(np.median(np.log(ratios[small])), 0, atol=0.02)
    assert abs(np.mean([crop.mirror for crop in crops]) - 0.5) < 0.03  # four standard deviations
    places = np.array([crop.left / (600 - crop.width) for crop in crops if crop.width < 300])
    np.testing.assert_allclose(np.quantile(places, [0.25, 0.5, 0.75]), [0.25, 0.5, 0.75], atol=0.04)


def test_training_pixels_are_the_crop_resized_and_mirrored(tmp_path: Path) -> None:
    """On a ramp of brightness the pixels are those at the crop's own coordinates, from left to right or from right to left."""
    path = _ramp(tmp_path)
    mirrored = set()
    for epoch in range(8):
        crop = training_crop(3, epoch, 4, 200, 120)
        pixels = training_pixels(path, 16, 3, epoch, 4)
        assert pixels.shape == (3, 16, 16)
        across = crop.left + (np.arange(16) + 0.5) * crop.width / 16 - 0.5
        expected = across[::-1] if crop.mirror else across
        np.testing.assert_allclose(pixels[0], np.broadcast_to(expected, (16, 16)), atol=3)
        down = 2 * (crop.top + (np.arange(16) + 0.5) * crop.height / 16 - 0.5)
        np.testing.assert_allclose(pixels[1], np.broadcast_to(down[:, None], (16, 16)), atol=5)
        mirrored.add(crop.mirror)
    assert mirrored == {True, False}


def _ramp(folder: Path) -> Path:
    """200 x 120 pixels: red is the column, green twice the row, with no colour information lost."""
    down, across = np.mgrid[:120, :200]
    ramp = np.stack([across, 2 * down, 0 * down], axis=2).astype(np.uint8)
    Image.fromarray(ramp).save(folder / "ramp.jpg", "JPEG", quality=100, subsampling=0)
    return folder / "ramp.jpg"


@pytest.mark.parametrize(
    ("text", "where", "match"),
    [
        ("{good} 1\n\n{good} one\n", ":3", "`path label`"),
        ("{good} 1.0\n", ":1", "`path label`"),
        ("{good}\n", ":1", "`path label`"),
        ("7\n", ":1", "`path label`"),
        ("{good} 1\n{good} 5\n", ":2", "not the label of a class.*got 5"),
        ("{good} -1\n", ":1", "not the label of a class"),
        ("nowhere/nothing.JPEG 1\n", ":1", "no such file"),
        ("", "train.txt", "lists no picture"),
        ("\n \n", "train.txt", "lists no picture"),
        (None, "train.txt", "cannot be read"),
        (b"\xff\xfe 1\n", "train.txt", "utf-8"),
    ],
)
def test_bad_lines_are_named(text: str | bytes | None, where: str, match: str, images: Path, tmp_path: Path) -> None:
    """The error of a list names its file and line, and says how to mend it."""
    (tmp_path / "train").symlink_to(images / "train")
    if isinstance(text, str):
        text = text.replace("{good}", "of one/0 é.JPEG").encode()
    if text is not None:
        (tmp_path / "train.txt").write_bytes(text)
    with pytest.raises(ConfigError, match=match) as caught:
        read_list(tmp_path, "train", CLASSES)
    assert caught.value.hint
    assert f"{tmp_path}/train.txt" in str(caught.value)
    assert where in str(caught.value)


def test_decoding_threads_read_the_same_and_end_with_the_reader(prepared: Path, images: Path) -> None:
    """Two threads give, also after a jump, what one reader without gives; global random numbers stay; closing ends them."""
    state = torch.get_rng_state()
    sampler = _sampler(batch_size=4, trainers=1, uneven="pad")
    reader, plain = (ImageBatches(prepared, images, sampler, SIZE, workers, torch.float32) for workers in (2, 0))
    for number, position in enumerate([0, 1, 2, 3, 7, 2, 0, 1], start=1):
        (inputs, labels), (expected, right) = reader.batch(position), plain.batch(position)
        assert torch.equal(inputs, expected)
        assert torch.equal(labels, right)
        assert len(reader.times) == number
    assert torch.equal(state, torch.get_rng_state())
    assert any(thread.name.startswith("fleetbench-decode") for thread in threading.enumerate())
    reader.close()
    reader.close()
    assert not any(thread.name.startswith("fleetbench-decode") for thread in threading.enumerate())
