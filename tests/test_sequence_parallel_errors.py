"""What the layers say of a sequence that cannot be split, and of a `sequence_axis` not there."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layouts import jit
from model_axis import mesh_of, sharded

from gradaccum.tensor_parallel import column_dense, row_dense


def error_of(fun, *args):
    mesh = mesh_of(2, 4, names=("dp", "mp"))
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller matches the text
        jit(sharded(fun, P(), P(), mesh))(*args)
    return str(caught.value)


def test_a_sequence_that_m_does_not_divide():
    x, w = np.ones((6, 3)), np.ones((3, 5))
    message = error_of(lambda x, w: row_dense(x, w, None, "mp", sequence_axis=0), x, w)
    assert message == (
        "row_dense: got x with shape (6, 3); axis 0 (6) is not divisible by the 4 devices along "
        "axis_name='mp'. Pad it to 8 and mask what was added, or take a number of devices that "
        "divides 6."
    )


@pytest.mark.parametrize("layer", [column_dense, row_dense], ids=lambda f: f.__name__)
def test_a_sequence_axis_that_x_does_not_have(layer):
    def message(axis):
        fun = lambda x, w: layer(x, w, None, "mp", sequence_axis=axis)  # noqa: E731
        return error_of(fun, np.ones((4, 6)), np.ones((6, 8)))

    api = layer.__name__
    for axis in (-1, 1):
        assert message(axis) == (
            f"{api}: got sequence_axis={axis} for x with shape (4, 6); the last dimension holds "
            "the features. Give the dimension of the sequence."
        )
    for axis in (2, -3):
        assert message(axis) == (
            f"{api}: got sequence_axis={axis} for x with shape (4, 6), needed -2 <= sequence_axis "
            "< 2. Give the dimension that is split over the devices."
        )
