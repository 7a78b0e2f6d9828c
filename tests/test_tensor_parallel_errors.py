"""What the tensor-parallel layers say of axes, shapes and weights that cannot be right."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradaccum.tensor_parallel import column_dense, embedding, row_dense

ARGUMENTS = {
    embedding: (np.ones((12, 4), np.float32), np.arange(3)),
    column_dense: (np.ones((3, 4), np.float32), np.ones((4, 8), np.float32), None),
    row_dense: (np.ones((3, 8), np.float32), np.ones((8, 4), np.float32), None),
}
LAYERS = tuple(ARGUMENTS)


def error_of(fun, *args, typed=False):
    mesh = jax.make_mesh((2, 4), ("dp", "mp"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller matches the text
        jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=typed))(*args)
    return str(caught.value)


@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_an_axis_that_is_not_manual_here(layer):
    args = ARGUMENTS[layer]
    assert error_of(lambda *args: layer(*args, "tp"), *args) == (
        f"{layer.__name__}: got axis_name='tp', needed a manual axis of the mesh or a tuple of "
        "different ones; manual here: dp=2, mp=4. Call it inside a jax.shard_map over that axis "
        "(in its axis_names, if they are given)."
    )
    with pytest.raises(ValueError, match=f"{layer.__name__}: got axis_name=.*no axis is manual"):
        layer(*args, axis_name="mp")


SHAPE_ERRORS = {
    "rows of w": ((3, 4), (8, 6), None, "got x (3, 4), w (8, 6), no bias;"),
    "rank of w": ((3, 4), (4,), None, "got x (3, 4), w (4,), no bias;"),
    "rank of x": ((), (4, 6), (6,), "got x (), w (4, 6), b (6,);"),
    "size of b": ((3, 4), (4, 6), (24,), "got x (3, 4), w (4, 6), b (24,);"),
    "rank of b": ((3, 4), (4, 6), (1, 6), "got x (3, 4), w (4, 6), b (1, 6);"),
}


@pytest.mark.parametrize("case", SHAPE_ERRORS)
@pytest.mark.parametrize("layer", [column_dense, row_dense], ids=lambda f: f.__name__)
def test_shapes_that_do_not_match(layer, case):
    *shapes, got = SHAPE_ERRORS[case]
    args = [None if s is None else np.zeros(s, np.float32) for s in shapes]
    part = "columns" if layer is column_dense else "rows"
    assert error_of(lambda *args: layer(*args, "mp"), *args) == (
        f"{layer.__name__}: {got} needed x [..., I], w [I, O] and b [O]. They are this device's "
        f"parts: w has 1/4 of the {part} (axis_name='mp', 4 devices)."
    )


@pytest.mark.parametrize("layer", LAYERS, ids=lambda f: f.__name__)
def test_typed_weights_that_all_devices_hold_whole(layer):
    args = ARGUMENTS[layer]
    name, part = {
        embedding: ("table with shape (12, 4)", "rows"),
        column_dense: ("w with shape (4, 8)", "columns"),
        row_dense: ("w with shape (8, 4)", "rows"),
    }[layer]
    assert error_of(lambda *args: layer(*args, "mp"), *args, typed=True) == (
        f"{layer.__name__}: got {name} that is the same on all devices of mp, needed this "
        f"device's {part}. Split it over that axis in the in_specs of the shard_map."
    )
