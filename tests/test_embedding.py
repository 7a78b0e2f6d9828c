"""`embedding`: ids of any dtype, range and owner."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gradaccum.tensor_parallel import embedding, reduce_from

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)

modes = pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])


def sharded(fun, in_specs, out_specs, m=2, typed=False):
    mesh = jax.make_mesh((m,), ("mp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:m])
    return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=typed)


def test_c9_an_id_that_another_device_owns():
    """C9: a local table indexed by what is left of a global id wraps or clamps."""

    def unmasked(table, ids):
        return reduce_from(table[ids - jax.lax.axis_index("mp") * table.shape[0]], "mp")

    table, ids = 10.0 * jnp.arange(8.0)[:, None], jnp.array([1, 5])
    results = []
    for fun in (unmasked, lambda table, ids: embedding(table, ids, "mp")):
        results.append(jit(sharded(fun, (P("mp"), P()), P()))(table, ids)[:, 0].tolist())
    assert results == [[60, 80], [10, 50]]


WIDTHS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("x64", [False, True], ids=["", "x64"])
@modes
def test_ids_of_any_width_out_of_range_and_negative(typed, x64):
    """Shards of 256 rows, so that a byte cannot hold where the others begin."""
    rows, table = 1024, np.arange(1.0, 1025.0, dtype=np.float32)[:, None]
    widths = WIDTHS if x64 else WIDTHS[:-2]
    ids = {}
    for width in widths:
        limits = np.iinfo(width)
        wanted = [0, 1, 1, 127, 255, 256, 1000, 1023, 1024, -1, -257, limits.min, limits.max]
        fits = [i for i in wanted if limits.min <= i <= limits.max]
        ids[width] = np.array(fits, width)

    def loss(table, ids):
        found = {width: embedding(table, i, "mp") for width, i in ids.items()}
        return sum(jnp.sum(f**2) for f in found.values()), found

    with jax.enable_x64(x64):
        fun = jax.value_and_grad(loss, has_aux=True)
        out = ((P(), P()), P("mp"))
        (_, found), grad = jit(sharded(fun, (P("mp"), P()), out, 4, typed))(table, ids)
    want = np.zeros_like(table)
    for width, values in ids.items():
        inside = [int(i) if 0 <= int(i) < rows else None for i in values]
        np.testing.assert_array_equal(
            found[width][:, 0], [0 if i is None else table[i, 0] for i in inside], err_msg=width
        )
        for i in inside:
            if i is not None:
                want[i] += 2 * table[i]
    np.testing.assert_array_equal(grad, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32"])
def test_rows_are_exact_in_the_tables_dtype(dtype):
    table = (100 * helpers.normal(0, 8, 3)).astype(jnp.dtype(dtype))
    fun = sharded(lambda t, i: embedding(t, i, "mp"), (P("mp"), P()), P(), 4)
    got = jit(fun)(table, np.int32([[7, 2], [0, 5]]))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, table[np.int32([[7, 2], [0, 5]])])


@pytest.mark.parametrize("ids", [3, np.zeros((0, 2), np.int32)], ids=["a scalar", "none"])
def test_ids_of_any_shape(ids):
    table = np.arange(8, dtype=np.float32)[:, None]
    fun = sharded(lambda table: embedding(table, ids, "mp"), P("mp"), P())
    np.testing.assert_array_equal(jit(fun)(table), table[ids])


def look_up(table, ids):
    return jit(sharded(lambda t, i: embedding(t, i, "mp"), (P("mp"), P()), P()))(table, ids)


@pytest.mark.parametrize("ids", [np.ones(3, np.float32), np.ones(3, bool)], ids=["float", "bool"])
def test_ids_that_are_no_integers(ids):
    with pytest.raises(TypeError) as caught:
        look_up(np.ones((8, 1)), ids)
    assert str(caught.value) == (
        f"embedding: got ids of dtype {ids.dtype}, needed integers: the global row numbers."
    )


def test_a_table_that_is_no_matrix():
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is compared
        look_up(np.ones(8), np.arange(3))
    assert str(caught.value) == (
        "embedding: got table with shape (4,), needed [V/m, D]: this device's rows."
    )
