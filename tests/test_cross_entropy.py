"""`cross_entropy` over a sharded vocabulary equals the unsharded one, in values and gradients."""

import functools

import helpers
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import audit
from gradaccum.tensor_parallel import column_dense, cross_entropy, reduce_from

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)

modes = pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])

SHAPE, V = (2, 3), 12  # of targets; columns, which 1, 2 and 4 divide
PADDED = 9  # a vocabulary in V columns: of four devices, the last has no real column
COLUMNS = P(None, None, "mp")
LOGITS = 3 * helpers.normal(0, *SHAPE, V)
TARGETS = np.array([[0, 5, 8], [11, 3, 7]])
WEIGHTS = helpers.normal(1, *SHAPE)  # each loss counts differently


def mesh_of(*sizes, names=("mp",)):
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def sharded(fun, in_specs, out_specs, m=4, typed=False):
    options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": typed}
    return jax.shard_map(fun, mesh=mesh_of(m), **options)


def weighed(logits, loss_fn):
    losses = loss_fn(logits)
    return jnp.sum(losses * WEIGHTS.astype(losses.dtype)), losses


def losses_and_gradient(logits, targets, m=4, typed=False, **options):
    """Returns the losses, and the gradient of their weighted sum, from a sharded vocabulary."""

    def fun(logits, targets):
        loss_fn = functools.partial(cross_entropy, targets=targets, axis_name="mp", **options)
        grads, losses = jax.grad(weighed, has_aux=True)(logits, loss_fn)
        return losses, grads

    return jit(sharded(fun, (COLUMNS, P()), (P(), COLUMNS), m, typed))(logits, targets)


def losses_of(logits, counts, ids, label_smoothing=0.0, z_loss=0.0):
    """Returns the losses as optax has them, of what counts; the z-loss by hand."""
    logits = jnp.where(counts[..., None], logits, 0)
    labels = jax.nn.one_hot(ids, logits.shape[-1], dtype=logits.dtype)
    losses = optax.softmax_cross_entropy(logits, optax.smooth_labels(labels, label_smoothing))
    losses += z_loss * jax.scipy.special.logsumexp(logits, axis=-1) ** 2
    return jnp.where(counts, losses, 0)


def counted(targets, columns, where=None):
    """Returns which targets count, and the ids of those."""
    counts = np.broadcast_to(True if where is None else where, targets.shape)
    counts = counts & (targets >= 0) & (targets < columns)
    return counts, np.where(counts, targets, 0).astype(np.int32)


@functools.partial(jit, static_argnums=0)  # few programs for many references
def _reference(columns, logits, weights, *rest):
    def loss(logits):
        losses = losses_of(logits[..., :columns], *rest)
        return jnp.sum(losses * weights), losses

    grads, losses = jax.grad(loss, has_aux=True)(logits)
    return losses, grads


def reference(
    logits, targets, where=None, label_smoothing=0.0, z_loss=0.0, vocab_size=None, weights=WEIGHTS
):
    """Returns losses and gradient of the whole vocabulary, in float64 from these very values."""
    logits, columns = np.asarray(logits, np.float64), vocab_size or logits.shape[-1]
    rest = *counted(np.asarray(targets), columns, where), label_smoothing, z_loss
    with jax.enable_x64(True):
        return jax.device_get(_reference(columns, logits, np.asarray(weights, np.float64), *rest))


# --- Against the unsharded loss -------------------------------------------------------------------

IGNORED = {  # for each dtype, what is no id of V columns
    "int8": [-1, -100, 127],
    "int16": [-1, -100, 2**15 - 1],
    "int32": [-1, -(2**31), 2**31 - 1],
    "int64": [-1, -100, V],
    "uint8": [V, 128, 255],
    "uint16": [V, 2**15, 2**16 - 1],
    "uint32": [V, 2**31, 2**32 - 1],
    "uint64": [V, 2**32, 2**64 - 1],
}
WHERE = {
    "none": None,
    "each": np.array([[True, False, True], [True, True, False]]),
    "columns": np.array([[True, False, True]]),
    "rows": np.array([[False], [True]]),
    "last": np.array([False, True, True]),
    "all false": False,
}
CASES = helpers.pairwise({
    "m": [1, 2, 4],
    "typed": [False, True],
    "dtype": ["bfloat16", "float16", "float32", "float64"],
    "ignored": [False, True],
    "where": list(WHERE),
    "label_smoothing": [0.0, 0.1, 1],
    "z_loss": [0.0, 0.01],
    "vocab_size": [None, PADDED],
})  # fmt: skip


def ignore(targets, ids):
    """Returns the targets in this dtype, some of them none of the vocabulary's."""
    targets = targets.astype(ids)
    targets[[0, 1, 1], [0, 0, 2]] = np.array(IGNORED[ids], ids)
    return targets


def check(got, want, dtype, columns=V):
    (losses, grads), (want_losses, want_grads) = got, want
    wide = "float64" if dtype == "float64" else "float32"
    assert (losses.dtype, grads.dtype) == (wide, dtype)
    helpers.assert_close(losses, want_losses)
    helpers.assert_close(grads, want_grads)
    np.testing.assert_array_equal(losses[want_losses == 0], 0)
    np.testing.assert_array_equal(grads[want_losses == 0], 0)
    np.testing.assert_array_equal(grads[..., columns:], 0)


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(map(str, c.values())))
def test_losses_and_gradients_are_the_unsharded_ones(case):
    case = dict(case)
    m, typed, dtype, ignored = (case.pop(name) for name in list(case)[:4])
    case["where"] = WHERE[case["where"]]
    targets = ignore(TARGETS, "int32") if ignored else TARGETS
    with jax.enable_x64(dtype == "float64"):
        logits = jnp.asarray(LOGITS).astype(dtype)
        got = losses_and_gradient(logits, targets, m, typed, **case)
    check(got, reference(logits, targets, **case), dtype, case["vocab_size"] or V)


@pytest.mark.parametrize("ids", IGNORED)
def test_targets_of_every_integer_dtype(ids):
    targets = ignore(TARGETS, ids)
    logits = LOGITS.astype(np.float32)
    with jax.enable_x64(ids in ("int64", "uint64")):
        got = losses_and_gradient(logits, targets)
    want = reference(logits, targets)
    assert [bool(x) for x in want[0].ravel() == 0] == [True, False, False, True, False, True]
    check(got, want, "float32")


def test_the_cases_hold_what_is_ignored_and_what_is_not():
    """The table above would pass empty: targets of every kind stand in it, beside counted ones."""
    kinds = {(c["ignored"], c["where"]) for c in CASES}
    assert len(kinds) == 2 * len(WHERE)
    losses, grads = reference(LOGITS, TARGETS, vocab_size=PADDED)
    assert [bool(x) for x in losses.ravel() == 0] == [t >= PADDED for t in TARGETS.ravel()]
    assert np.all(grads[losses != 0][:, :PADDED])


@hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],  # each step of shrinking a failure compiles a program
)
@hypothesis.given(data=st.data())
def test_random_shapes_masks_and_options(data):
    m = data.draw(st.sampled_from([1, 2, 4]), "m")
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3), "shape"))
    columns = m * data.draw(st.integers(1, 4), "columns on a device")
    padding = st.none() | st.integers(columns // m + 1, columns) if m > 1 else st.none()
    options = {
        "vocab_size": data.draw(padding, "vocab_size"),
        "label_smoothing": data.draw(st.sampled_from([0.0, 0.25, 1.0]), "label_smoothing"),
        "z_loss": data.draw(st.sampled_from([0.0, 0.5]), "z_loss"),
    }
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    logits = rng.normal(size=(*shape, columns)).astype(np.float32) * 10
    targets = rng.integers(-2, columns + 2, shape)
    where = rng.random(shape) < 0.7
    weights = rng.normal(size=shape).astype(np.float32)

    def fun(logits, where):
        def loss(logits):
            losses = cross_entropy(logits, targets, "mp", where=where, **options)
            return jnp.sum(losses * weights), losses

        grads, losses = jax.grad(loss, has_aux=True)(logits)
        return losses, grads

    spec = P(*(None,) * len(shape), "mp")
    typed = data.draw(st.booleans(), "typed")
    got = jit(sharded(fun, (spec, P()), (P(), spec), m, typed))(logits, where)
    want = reference(logits, targets, where, weights=weights, **options)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@modes
def test_two_axes_are_one_vocabulary(typed):
    def fun(logits, targets):
        loss_fn = functools.partial(cross_entropy, targets=targets, axis_name=("b", "a"))
        grads, losses = jax.grad(weighed, has_aux=True)(logits, loss_fn)
        return losses, grads

    spec, mesh = P(None, None, ("b", "a")), mesh_of(2, 2, names=("a", "b"))
    specs = {"in_specs": (spec, P()), "out_specs": (P(), spec), "check_vma": typed}
    got = jit(jax.shard_map(fun, mesh=mesh, **specs))(LOGITS.astype(np.float32), TARGETS)
    helpers.assert_close(got, reference(LOGITS.astype(np.float32), TARGETS), "float32")


@modes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38], ids=str)
def test_logits_of_ignored_targets_and_of_padding_may_be_anything(typed, bad):
    targets = TARGETS.copy()
    targets[0, 0], targets[1, 1] = -1, V
    where = WHERE["columns"]
    logits = LOGITS.astype(np.float32)
    clean = reference(logits, targets, where=where, vocab_size=PADDED, z_loss=0.1)
    logits[clean[0] == 0] = bad
    logits[..., PADDED:] = bad
    options = {"where": where, "vocab_size": PADDED, "z_loss": 0.1}
    got = losses_and_gradient(logits, targets, 4, typed, **options)
    helpers.assert_close(got, clean, "float32")


def test_a_mask_after_the_loss_would_keep_nan_in_the_gradient():
    """The control of the test above, unsharded: N4's kind."""
    logits = LOGITS[0, :2].astype(np.float32)
    logits[0] = np.nan

    def masked(logits):
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, np.array([1, 2]))
        return jnp.sum(jnp.where(np.array([False, True]), losses, 0))

    loss, grads = jit(jax.value_and_grad(masked))(logits)
    assert np.isfinite(loss)
    assert np.isnan(grads[0]).all()


# --- Inside transformations ----------------------------------------------------------------------


def scanned(logits, targets, loss_fn):
    """Rows by a scan that is recomputed, tokens by vmap."""

    @jax.checkpoint
    def row(total, xs):
        losses = jax.vmap(lambda row, ids: loss_fn(jnp.tanh(row), ids))(*xs)
        return total + jnp.sum(losses**2), losses

    return jax.lax.scan(row, jnp.zeros((), logits.dtype), (logits, targets))


@modes
def test_scan_remat_vmap(typed):
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": PADDED}
    sharded_loss = functools.partial(cross_entropy, axis_name="mp", **options)

    def fun(logits, targets, loss_fn=sharded_loss):
        return jax.value_and_grad(scanned, has_aux=True)(logits, targets, loss_fn)

    specs = (COLUMNS, P()), ((P(), P()), COLUMNS)
    got = jit(sharded(fun, *specs, 4, typed))(LOGITS.astype(np.float32), TARGETS)
    with jax.enable_x64(True):
        wide = LOGITS.astype(np.float32).astype(np.float64)

        def total(logits):
            losses = losses_of(jnp.tanh(logits)[..., :PADDED], *counted(TARGETS, PADDED), 0.1, 0.1)
            return jnp.sum(losses**2), losses

        want = jit(jax.value_and_grad(total, has_aux=True))(wide)
    helpers.assert_close(got, jax.device_get(want), "float32")


@modes
def test_second_derivatives(typed):
    """The gradient of the squared norm of the gradient, over all shards."""
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": PADDED}

    def penalty(logits, loss_fn, total=lambda x: x):
        return total(jnp.sum(jax.grad(lambda x: weighed(x, loss_fn)[0])(logits) ** 2))

    def fun(logits, targets):
        loss_fn = functools.partial(cross_entropy, targets=targets, axis_name="mp", **options)
        total = functools.partial(reduce_from, axis_name="mp")
        return jax.grad(penalty)(logits, loss_fn, total)

    logits = LOGITS.astype(np.float32)
    got = jit(sharded(fun, (COLUMNS, P()), COLUMNS, 4, typed))(logits, TARGETS)
    with jax.enable_x64(True):

        def loss_fn(logits):
            return losses_of(logits[..., :PADDED], *counted(TARGETS, PADDED), 0.1, 0.1)

        fun = jax.grad(functools.partial(penalty, loss_fn=loss_fn))
        want = jax.device_get(jit(fun)(logits.astype(np.float64)))
    helpers.assert_close(got, want, "float32")


def test_lists_are_arrays():
    def fun(logits):
        return cross_entropy(logits, TARGETS.tolist(), "mp", where=[[True], [False]])

    logits = LOGITS.astype(np.float32)
    want = reference(logits, TARGETS, where=np.array([[True], [False]]))
    helpers.assert_close(jit(sharded(fun, (COLUMNS,), P()))(logits), want[0], "float32")


@modes
def test_accumulated_with_weights_it_is_the_mean_over_all_tokens(typed):
    """A head sharded over mp, data over dp, microbatches with 0 to 3 tokens: one weighted mean."""
    ids = np.random.default_rng(2).integers(-6, V, (8, 3))
    ids[:2] = -1  # the first microbatch of the first device has no token at all
    x, w = helpers.normal(3, 8, 3, 5).astype(np.float32), helpers.normal(4, 5, V).astype(np.float32)

    def count(x, ids):
        del x
        return jnp.sum(ids >= 0).astype(jnp.float32)

    def loss_fn(w, x, ids):
        losses = cross_entropy(column_dense(x, w, None, "mp"), ids, "mp")
        return jnp.sum(losses) / count(x, ids)

    accumulated = gradaccum.accumulate(
        loss_fn,
        microbatches=2,
        axis_name="dp",
        mesh=mesh_of(2, 2, names=("dp", "mp")),
        batch_argnums=(1, 2),
        weight_fn=count,
        in_specs=(P(None, "mp"),),
        check_vma=typed,
    )
    got = jit(jax.value_and_grad(accumulated))(w, x, ids)

    def plain(w):
        return jnp.sum(losses_of(x @ w, *counted(ids, V))) / np.sum(ids >= 0)

    helpers.assert_close(got, jit(jax.value_and_grad(plain))(w), "float32")
    rows = audit.collectives(jit(jax.value_and_grad(accumulated)), w, x, ids)
    assert {row.executions for row in rows if row.axes == ("dp",)} == {1}


# --- Collectives ---------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize(
    ("options", "parts"),
    [({}, 2), ({"z_loss": 0.1, "vocab_size": PADDED}, 2), ({"label_smoothing": 0.1}, 3)],
    ids=["plain", "z_loss", "smoothed"],
)
def test_two_all_reduces_forward_and_none_backward(typed, options, parts):
    def loss_fn(logits, targets):
        return cross_entropy(logits, targets, "mp", **options)

    def backward(logits, targets):
        # The cotangent is not known in advance, so the forward pass is there, and only once.
        return jax.grad(lambda x: jnp.sum(loss_fn(x, targets) ** 2))(logits)

    logits = LOGITS.astype(np.float32)
    for fun, out in (loss_fn, P()), (backward, COLUMNS):
        rows = audit.collectives(jit(sharded(fun, (COLUMNS, P()), out, 4, typed)), logits, TARGETS)
        found = sorted((row.kind, row.axes, row.dtype, row.bytes, row.executions) for row in rows)
        each = ("all-reduce", ("mp",), "f32")
        assert found == [(*each, 4 * 6, 1), (*each, 4 * 6 * parts, 1)], rows


@modes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_backward_pass_keeps_the_logits_and_nothing_else_of_their_size(typed, dtype):
    """No mask and no float32 copy: what a scan over chunks of tokens holds for each."""
    kept = []

    def fun(logits, targets):
        options = {"label_smoothing": 0.1, "z_loss": 0.1, "vocab_size": PADDED}
        loss_fn = functools.partial(cross_entropy, targets=targets, axis_name="mp", **options)
        losses, backward = jax.vjp(loss_fn, logits)
        kept.extend(x for x in jax.tree.leaves(backward) if jnp.size(x) >= logits.size)
        return losses

    logits = jax.ShapeDtypeStruct((*SHAPE, V), dtype)
    jax.eval_shape(sharded(fun, (COLUMNS, P()), P(), 2, typed), logits, TARGETS)
    assert [(x.shape, x.dtype) for x in kept] == [((*SHAPE, V // 2), dtype)]
