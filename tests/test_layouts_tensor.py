"""Layouts with tensor parallelism equal one device, and the ways to run its products equal each other."""

import pytest
from layouts import LAYOUTS, assert_equals_one_device, gradients
from tiny import assert_close

pytestmark = pytest.mark.slow  # its light tests share what the others compile

SPLIT = [name for name, (_, changes) in LAYOUTS.items() if changes.get("mesh__tensor", 1) > 1 and "expert" not in name]


@pytest.mark.parametrize("layout", SPLIT)
def test_equal_to_one_device(layout):
    assert_equals_one_device(layout)


def test_products_in_ring_steps_change_no_number():
    """Nor does splitting positions over tensor."""
    shared = dict(mesh__fsdp=2, mesh__tensor=4, model__mlp_bias=True)
    ring = gradients(**shared)
    for changes in (dict(overlap__collective_matmul=False), dict(sharding__sequence_parallel=False)):
        other = gradients(**shared, **changes)
        assert abs(other[0] / ring[0] - 1) < 1e-6
        assert_close(other[1], ring[1], 5e-6)
