"""Layouts with tensor parallelism equal one device, and the two ways to run its products equal each other."""

import pytest
from layouts import LAYOUTS, assert_equals_one_device

SPLIT = [name for name, (_, changes) in LAYOUTS.items() if changes["mesh__tensor"] > 1]


@pytest.mark.parametrize("layout", SPLIT)
def test_equal_to_one_device(layout):
    assert_equals_one_device(layout)
