"""Activations sharded along the sequence: the layers' `sequence_axis`, alone and accumulated."""

import collections
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layouts import in_float64, jit
from model_axis import cast, mesh_of, modes, sharded, sizes

import gradaccum
from gradaccum import audit
from gradaccum.tensor_parallel import (
    all_gather_to,
    column_dense,
    copy_to,
    gather_from,
    reduce_from,
    reduce_scatter_from,
    row_dense,
)

# --- A network between whose layers the sequence is sharded ---------------------------------------

T, D, F = 4, 4, 8
SHAPES = {"scale": (D,), "up": (D, F), "a": (F,), "down": (F, D), "b": (D,)}
SPECS = {"scale": P(), "up": P(None, "mp"), "a": P("mp"), "down": P("mp"), "b": P()}
PARAMS = {name: helpers.normal(i, *shape) / 2 for i, (name, shape) in enumerate(SHAPES.items())}
X = helpers.normal(9, 2, T, D)
ON_SEQUENCE = P(None, "mp")

SEQUENCE = {
    "f": lambda x: copy_to(x, "mp"),
    "g": lambda x: reduce_from(x, "mp"),
    "columns": lambda x, w, b: column_dense(x, w, b, "mp", sequence_axis=-2),
    "rows": lambda x, w, b: row_dense(x, w, b, "mp", sequence_axis=1),
}


def dense(x, w, b):
    return x @ w + b[None, None]


WHOLE = {"f": lambda x: x, "g": lambda x: x, "columns": dense, "rows": dense}


def network(p, x, f, g, columns, rows):
    """A replicated scale on sharded activations needs an f, as the row bias does."""
    h = x / (1 + jnp.abs(x).max(-1, keepdims=True)) * f(p["scale"])[None, None]
    h = x + jnp.sin(rows(jnp.tanh(columns(h, p["up"], p["a"])), p["down"], p["b"]))
    return g(jnp.sum(h**3)) / x.shape[0]


def both(layers, m=2, typed=False):
    fun = jax.value_and_grad(functools.partial(network, **layers), argnums=(0, 1))
    return jit(sharded(fun, (SPECS, ON_SEQUENCE), (P(), (SPECS, ON_SEQUENCE)), m, typed))


WANT = jax.value_and_grad(functools.partial(network, **WHOLE), argnums=(0, 1))


@sizes
@modes
def test_loss_and_gradients_are_the_unsharded_networks(typed, m):
    with jax.enable_x64(True):
        got = both(SEQUENCE, m, typed)(PARAMS, X)
    helpers.assert_close(got, in_float64(WANT, PARAMS, X), "float64")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@modes
def test_narrower_dtypes_are_kept(typed, dtype):
    args = cast((PARAMS, X), dtype)
    got = both(SEQUENCE, 2, typed)(*args)
    assert {str(x.dtype) for x in jax.tree.leaves(got)} == {dtype}
    helpers.assert_close(got, in_float64(WANT, *args))


CONTROLS = {  # a broken part, the leaves whose gradient is wrong
    "a scale without f": ({"f": lambda x: x}, {"scale"}),
    "a row bias without f": (
        {"rows": lambda x, w, b: reduce_scatter_from(x @ w, "mp", 1) + b[None, None]},
        {"b"},
    ),
    "gather_from before columns": (
        {"columns": lambda x, w, b: dense(gather_from(x, "mp", 1), w, b)},
        {"scale", "x"},
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_untyped_without_an_f_the_loss_is_right_and_gradients_are_parts(control):
    broken, wrong = CONTROLS[control]
    loss, (grads, grad_x) = both(SEQUENCE | broken)(*cast((PARAMS, X), "float32"))
    want_loss, (want, want_x) = in_float64(WANT, PARAMS, X)
    helpers.assert_close(loss, want_loss, "float32")
    grads, want = grads | {"x": grad_x}, want | {"x": want_x}
    right = [n for n in grads if np.abs(grads[n] - want[n]).max() < 1e-5 * np.abs(want[n]).max()]
    assert set(grads) - set(right) == wrong


# --- Inside accumulate ----------------------------------------------------------------------------

DP_MP = mesh_of(2, 2, names=("dp", "mp"))
BATCH = helpers.normal(10, 8, T, D).astype(np.float32)
P32 = cast(PARAMS, "float32")


def decorate(fun, typed=False, specs=None, batch_spec=None):
    in_specs = (SPECS if specs is None else specs, batch_spec or P("dp", "mp"))
    return gradaccum.accumulate(
        fun, microbatches=2, axis_name="dp", mesh=DP_MP, in_specs=in_specs, check_vma=typed
    )


@modes
def test_accumulated_gradients_are_those_of_the_whole_batch(typed):
    fun = jit(jax.value_and_grad(decorate(functools.partial(network, **SEQUENCE), typed)))
    want = in_float64(jax.value_and_grad(functools.partial(network, **WHOLE)), P32, BATCH)
    helpers.assert_close(fun(P32, BATCH), want, "float32")
    rows = audit.collectives(fun, P32, BATCH)
    assert [row.executions for row in rows if row.axes == ("dp",)] == [1]
    found = collections.Counter(row.kind for row in rows if row.axes == ("mp",))
    assert {row.executions for row in rows if row.axes == ("mp",)} == {2}  # each microbatch
    # A gather and a scatter forward, and backward; the loss, the scale and the bias in one sum.
    assert found["all-gather"] == found["reduce-scatter"] == 2
    summed = [row.bytes for row in rows if row.axes == ("mp",) and row.kind == "all-reduce"]
    assert sum(summed) == 4 + P32["scale"].nbytes + P32["b"].nbytes


@modes
def test_a_checkpoint_policy_saves_the_scattered_sums_by_their_name(typed):
    """Accumulated; the sines' derivatives need both sums."""
    names = jax.checkpoint_policies.save_only_these_names("gradaccum/tensor_parallel")
    counts, results = [], []
    for policy in (None, names):

        @functools.partial(jax.checkpoint, policy=policy)
        def blocks(p, x):
            for _ in range(2):
                up = jnp.tanh(SEQUENCE["columns"](x, p["up"], p["a"]))
                x = jnp.sin(SEQUENCE["rows"](up, p["down"], p["b"]))
            return x

        def loss(p, x, blocks=blocks):
            return reduce_from(jnp.sum(blocks(p, x) ** 3), "mp") / len(x)

        fun = jit(jax.value_and_grad(decorate(loss, typed)))
        rows = audit.collectives(fun, P32, BATCH)
        counts.append(sum(row.executions for row in rows if row.kind == "reduce-scatter"))
        results.append(fun(P32, BATCH))
    # Of each of 2 microbatches: two forward, the same again, and the second block's input's
    # cotangent (the first's has none).
    assert counts == [2 * (2 + 2 + 1), 2 * (2 + 1)]
    helpers.assert_close(results[1], results[0])


@pytest.mark.parametrize("control", ["a scale without f", "a row bias without f"])
def test_a_replicated_parameter_on_a_sharded_sequence_without_copy_to_is_refused(control):
    broken, _ = CONTROLS[control]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is compared
        jax.grad(decorate(functools.partial(network, **SEQUENCE | broken)))(P32, BATCH)
    message = str(caught.value)
    assert message.startswith(
        "accumulate: a value that is the same on all devices of mp is used where each has a part "
        "of its own ("
    )
    assert "test_sequence_parallel.py:" in message
    assert "Pass it through gradaccum.tensor_parallel.copy_to(x, 'mp') there" in message


def raw(x, axis_name, axis):
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=True)


def gathered(p, x, gather):
    """A loss that every device computes of the whole result: it counts once."""
    y = gather(jnp.tanh(x @ p["up"] + p["a"][None, None]), "mp", 2)
    return jnp.sum(jnp.sin(y) ** 2 * jnp.arange(1.0, 1.0 + F, dtype=y.dtype)[None, None]) / len(x)


UP = {"specs": {n: SPECS[n] for n in ("up", "a")}, "batch_spec": P("dp")}
UP_PARAMS = {n: P32[n] for n in ("up", "a")}


@modes
def test_a_replicated_loss_after_a_gather_counts_once_in_accumulate(typed):
    want = functools.partial(gathered, gather=lambda y, *_: y)
    want = in_float64(jax.value_and_grad(want), UP_PARAMS, BATCH)
    loss = decorate(functools.partial(gathered, gather=gather_from), typed, **UP)
    helpers.assert_close(jit(jax.value_and_grad(loss))(UP_PARAMS, BATCH), want, "float32")


def test_a_replicated_loss_after_a_raw_gather_would_count_twice_and_is_refused():
    want = functools.partial(gathered, gather=lambda y, *_: y)
    want_loss, want = in_float64(jax.value_and_grad(want), UP_PARAMS, BATCH)
    doubled = {n: 2 * g for n, g in want.items()}
    for gather in (raw, all_gather_to):
        fun = jax.value_and_grad(functools.partial(gathered, gather=gather))
        fun = sharded(fun, (UP["specs"], P()), (P(), UP["specs"]))
        helpers.assert_close(jit(fun)(UP_PARAMS, BATCH), (want_loss, doubled), "float32")
    loss = decorate(functools.partial(gathered, gather=raw), **UP)
    with pytest.raises(ValueError, match=r"^accumulate: .*raw collective.*all_gather over mp at"):
        jax.grad(loss)(UP_PARAMS, BATCH)
    # Types say that what was gathered for sharded computation varies, and so the loss.
    loss = decorate(functools.partial(gathered, gather=all_gather_to), True, **UP)
    with pytest.raises(ValueError, match=r"^accumulate: .*varies over it"):
        jax.grad(loss)(UP_PARAMS, BATCH)


# --- Collectives ---------------------------------------------------------------------------------

SMALL, LARGE = np.zeros((2, T, D), np.float32), np.zeros((2, T, F), np.float32)


def row(kind, size):
    return kind, ("mp",), size


GATHERS, SCATTERS = row("all-gather", SMALL.nbytes), row("reduce-scatter", SMALL.nbytes)
COSTS = {  # a function, its arguments, specs and results; collectives forward, and backward
    "column_dense": (
        SEQUENCE["columns"],
        *((SMALL, P32["up"], P32["a"]), (ON_SEQUENCE, P(None, "mp"), P("mp"))),
        *(P(None, None, "mp"), [GATHERS], [SCATTERS]),
    ),
    "row_dense": (
        SEQUENCE["rows"],
        *((LARGE, P32["down"], P32["b"]), (P(None, None, "mp"), P("mp"), P()), ON_SEQUENCE),
        *([SCATTERS], [GATHERS, row("all-reduce", P32["b"].nbytes)]),
    ),
}


@pytest.mark.parametrize("m", [1, 2])
@modes
@pytest.mark.parametrize("name", COSTS)
def test_collectives_are_those_of_the_docstring(name, typed, m):
    fun, args, specs, out, forward, backward = COSTS[name]

    def with_gradients(*args):
        y, transpose = jax.vjp(fun, *args)
        return y, transpose(jnp.cos(y))

    mesh = mesh_of(m, 2, names=("mp", "dp"))
    for call, results, kinds in (
        (fun, out, forward),
        (with_gradients, (out, specs), forward + backward),
    ):
        rows = audit.collectives(jit(sharded(call, specs, results, mesh, typed)), *args)
        found = sorted((row.kind, row.axes, row.bytes) for row in rows)
        assert found == (sorted(kinds) if m > 1 else []), rows
