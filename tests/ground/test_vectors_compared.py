"""Vectors side by side: figures known by hand, a wrong sample that was planted, and what cannot be compared."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetbench.errors import ConfigError
from fleetbench.vectors import WORST, Vectors, compare_vectors


def _vectors(rows: dict[str, list[float]], source: str = "offline") -> Vectors:
    return Vectors(tuple(rows), np.array(list(rows.values()), np.float32), source)


def test_figures_are_those_of_a_triangle() -> None:
    """(3, 4) against (4, 3): a cosine of 24/25, a difference of 1, a quarter of the largest; (1, 0) against itself: none."""
    found = compare_vectors(_vectors({"a": [3, 4], "b": [1, 0]}), _vectors({"b": [1, 0], "a": [4, 3]}, "online"), 0.25)
    assert (found["samples"], found["length"], found["num_equal"], found["num_past"], found["num_not_finite"]) == (2, 2, 1, 0, 0)
    worst, equal = found["worst"]
    assert {name: value for name, value in worst.items() if name != "cosine"} == {
        "id": "a",
        "difference": 1.0,
        "relative": 0.25,
        "component": 0,
        "offline": 3.0,
        "online": 4.0,
    }
    assert worst["cosine"] == pytest.approx(24 / 25, abs=1e-15)
    assert (equal["id"], equal["cosine"], equal["difference"], equal["relative"]) == ("b", 1.0, 0.0, 0.0)
    assert found["mean_cosine"] == pytest.approx((24 / 25 + 1) / 2, abs=1e-15)
    assert found["lowest_cosine"] == worst["cosine"]
    assert (found["difference"]["max"], found["difference"]["mean"], found["difference"]["p95"]) == (1.0, 0.5, pytest.approx(0.95))
    assert (found["relative"]["max"], found["relative"]["mean"]) == (0.25, 0.125)


@pytest.mark.parametrize(("tolerance", "passed"), [(0.25, True), (0.2499999, False), (0.0, False)])
def test_the_tolerance_itself_passes(tolerance: float, passed: bool) -> None:
    """A quarter is not past a quarter."""
    found = compare_vectors(_vectors({"a": [3, 4]}), _vectors({"a": [4, 3]}), tolerance)
    assert found["passed"] is passed
    assert found["num_past"] == (not passed)


def test_a_planted_sample_is_found() -> None:
    """Among 300 that differ by rounding, in another order; and only that one is past the tolerance."""
    generator = np.random.default_rng(3)
    values = generator.standard_normal((300, 8)).astype(np.float32)
    other = (values * (1 + 1e-6 * generator.standard_normal(values.shape))).astype(np.float32)
    other[217, 5] += np.float32(0.25)
    order = generator.permutation(300)
    ids = [f"sample {row}" for row in range(300)]
    online = Vectors(tuple(ids[row] for row in order), other[order], "online")
    found = compare_vectors(Vectors(tuple(ids), values, "offline"), online, 1e-4)
    assert found["num_past"] == 1
    worst = found["worst"][0]
    assert (worst["id"], worst["component"]) == ("sample 217", 5)
    assert worst["difference"] == pytest.approx(0.25, rel=1e-4)
    assert worst["relative"] == pytest.approx(0.25 / np.abs(values[217]).max(), rel=1e-4)
    assert len(found["worst"]) == WORST
    assert [item["relative"] for item in found["worst"]] == sorted((item["relative"] for item in found["worst"]), reverse=True)
    other[217, 5] = values[217, 5]
    mended = Vectors(online.ids, other[order], "online")
    assert compare_vectors(Vectors(tuple(ids), values, "offline"), mended, 1e-4)["passed"]


@given(st.lists(st.tuples(*[st.floats(-(2.0**100), 2.0**100, width=32)] * 4), min_size=1, max_size=6))
def test_figures_follow_their_definitions(pairs: list[tuple[float, ...]]) -> None:
    """Plain Python's sums for every sample, of any size and sign."""
    offline = {str(row): [pair[0], pair[1]] for row, pair in enumerate(pairs)}
    online = {str(row): [pair[2], pair[3]] for row, pair in enumerate(pairs)}
    found = {item["id"]: item for item in compare_vectors(_vectors(offline), _vectors(online), 0.0)["worst"]}
    for name, a in offline.items():
        b, item = online[name], found[name]
        difference = max(abs(y - x) for x, y in zip(a, b, strict=True))
        largest = max(map(abs, a))
        assert item["difference"] == difference
        if difference and not largest:
            assert item["relative"] is None
        else:
            assert item["relative"] == pytest.approx(difference / largest if difference else 0.0, rel=1e-12)
        norms = math.hypot(*a) * math.hypot(*b)
        if norms > 1e-60:
            assert item["cosine"] == pytest.approx(math.fsum(x * y for x, y in zip(a, b, strict=True)) / norms, abs=1e-12)


def test_vectors_of_zeros_have_no_angle() -> None:
    """Both zero: equal. One zero: nothing in common, and no tolerance is wide enough where the offline one is zero."""
    found = compare_vectors(
        _vectors({"both": [0, 0], "one": [0, 0], "other": [2, 0]}), _vectors({"both": [0, -0.0], "one": [1, 0], "other": [0, 0]}), 1e9
    )
    by_name = {item["id"]: item for item in found["worst"]}
    assert (by_name["both"]["cosine"], by_name["both"]["relative"]) == (1.0, 0.0)
    assert (by_name["one"]["cosine"], by_name["one"]["relative"]) == (0.0, None)
    assert (by_name["other"]["cosine"], by_name["other"]["relative"]) == (0.0, 1.0)
    assert found["num_past"] == 1
    assert found["num_not_finite"] == 0
    assert (found["relative"]["max"], found["relative"]["mean"]) == (None, 0.5)
    assert found["num_equal"] == 1


def test_not_a_number_never_passes() -> None:
    """On either side, or on both, infinity too; it comes first, at its place, and the figures are those of the other samples."""
    nan, inf = math.nan, math.inf
    offline = {"fine": [1, 2], "left": [nan, 2], "right": [1, 2], "both": [1, nan], "infinite": [1, inf]}
    online = {"fine": [1, 2.5], "left": [1, 2], "right": [1, inf], "both": [1, nan], "infinite": [1, inf]}
    found = compare_vectors(_vectors(offline), _vectors(online), 1e9)
    assert (found["num_past"], found["num_not_finite"]) == (4, 4)
    assert found["worst"][-1]["id"] == "fine"
    assert found["difference"]["max"] == 0.5
    places = {item["id"]: item["component"] for item in found["worst"]}
    assert places == {"left": 0, "right": 1, "both": 1, "infinite": 1, "fine": 1}
    data = json.loads(json.dumps(found, allow_nan=False))
    assert data["worst"][0]["cosine"] is None
    assert data["worst"][0]["difference"] is None
    assert data["passed"] is False
    nothing = compare_vectors(_vectors({"a": [nan]}), _vectors({"a": [nan]}), 1e9)
    assert (nothing["lowest_cosine"], nothing["difference"]["max"], nothing["num_past"]) == (None, None, 1)


def test_the_data_of_json_are_the_figures() -> None:
    """Every field, and whether it passed."""
    data = compare_vectors(_vectors({"a": [3, 4]}), _vectors({"a": [4, 3]}, "online"), 0.5)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["offline"], data["online"], data["passed"], data["tolerance"]) == ("offline", "online", True, 0.5)
    assert data["worst"] == [
        {"id": "a", "cosine": pytest.approx(0.96), "difference": 1.0, "relative": 0.25, "component": 0, "offline": 3.0, "online": 4.0}
    ]


def test_samples_of_one_side_are_named() -> None:
    """What the service was not asked for, and what nobody evaluated; each with its number and some ids."""
    many, few = _vectors({str(row): [1.0] for row in range(9)}, "many"), _vectors({"0": [1.0], "1": [1.0]}, "few")
    with pytest.raises(ConfigError, match="7 of 9 samples have no vector") as caught:
        compare_vectors(many, few, 1.0)
    assert (caught.value.where, caught.value.value) == ("few", "'2', '3', '4' and 4 more")
    assert "--samples" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="7 samples were not evaluated") as caught:
        compare_vectors(few, many, 1.0)
    assert (caught.value.where, caught.value.value) == ("many", "'2', '3', '4' and 4 more")
    assert caught.value.hint
    with pytest.raises(ConfigError, match="1 of 2 samples have no vector"):
        compare_vectors(few, _vectors({"0": [1.0], "x": [1.0]}), 1.0)


def test_vectors_of_another_length_are_refused() -> None:
    """With both lengths."""
    with pytest.raises(ConfigError, match="another length") as caught:
        compare_vectors(_vectors({"a": [1, 2, 3]}), _vectors({"a": [1, 2]}, "online"), 1.0)
    assert (caught.value.where, caught.value.value) == ("online", "2 numbers")
    assert "has 3" in str(caught.value.hint)
