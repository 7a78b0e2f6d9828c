"""`int8_quantize` on trees of all kinds: what travels, states, `MultiSteps`, errors."""

import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum import Unreduced, audit
from gradaccum.hooks import Residual, int8_quantize

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)
N = 8


@pytest.fixture(autouse=True)
def mesh():
    mesh = helpers.data_mesh(N)
    with jax.set_mesh(mesh):
        yield mesh


def rows_of(mesh, sums):
    on = NamedSharding(mesh, P("dp"))
    weight = jax.device_put(np.arange(1, N + 1, dtype=np.float32), on)
    return jax.tree.map(lambda x: Unreduced(jax.device_put(x, on), weight, "dp"), sums)


def float_sums(*shape, dtype=np.float32, seed=0):
    return jnp.asarray(helpers.normal(seed, N, *shape)).astype(dtype)


def mixed():
    return {
        "matrix": float_sums(40, 100),
        "none": None,
        "bf16": float_sums(4096, dtype=jnp.bfloat16, seed=1),
        "small": float_sums(1023, seed=2),
        "scalar": float_sums(seed=3),
        "int": jnp.arange(N * 2048, dtype=jnp.int32).reshape(N, 2048),
        "complex": float_sums(2048, dtype=np.complex64, seed=4) * (1 + 2j),
        "empty": jnp.zeros((N, 0, 7), np.float32),
        "nested": (float_sums(3, 0), [float_sums(7, 3, 100, seed=5)]),
    }


@pytest.mark.parametrize("feedback", [False, True], ids=["stateless", "feedback"])
def test_mixed_trees(mesh, feedback):
    """What is no float of rank 1 and min_size entries is exact, and the dtypes are a mean's."""
    rows = rows_of(mesh, mixed())
    hook = int8_quantize(error_feedback=feedback)
    state = hook.init(rows)
    fun = jit(hook).lower(rows, state).compile()
    got, _ = fun(rows, state)
    want = jit(gradaccum.mean)(rows)
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
    inexact = {"matrix", "bf16", "nested"}
    for k in want:
        a, b = ([np.asarray(x) for x in jax.tree.leaves(tree[k])] for tree in (got, want))
        same = all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
        assert same == (k not in inexact), k
        for x, y in zip(a, b, strict=True):
            assert np.all(np.abs(x - y) < 0.05)  # of rows of up to 4, weights of 36 together
    if feedback:
        kept = state.residual.rows
        assert isinstance(state.residual, Residual)
        has = {k for k, x in kept.items() if jax.tree.leaves(x)}
        assert has == inexact
        assert kept["matrix"].shape == (N, 40, 100)
        assert {x.dtype for x in jax.tree.leaves(kept)} == {np.dtype(np.float32)}


def test_bytes_on_the_wire(mesh):
    """A byte an entry each way, 4 a block, and what travels in full: in one operation each."""
    sums = {"a": float_sums(64, 256), "b": float_sums(3, 1000), "c": float_sums(100)}
    rows = rows_of(mesh, sums)

    def sent(hook):
        program = jax.jit(lambda rows: hook(rows, ())[0]).lower(rows).compile()
        audit.assert_one_reduction(program, axis_name="dp", mesh=mesh)
        report = audit.collectives(program, mesh=mesh)
        assert {row.executions for row in report} == {1}
        return {(r.kind, r.dtype): r.bytes for r in report}, report.totals["dp"].wire_bytes

    # a: 2,048 entries a device, in 8 blocks; b: 375, in 2; the 10 scales are padded to a block too.
    int8 = 8 * (8 + 2 + 1) * 256
    got, wire = sent(int8_quantize())
    assert got == {
        ("all-to-all", "s8"): int8,
        ("all-gather", "s8"): int8,
        ("all-reduce", "f32"): 4 * (100 + 3),
    }
    full, full_wire = sent(gradaccum.hooks.allreduce())
    assert full == {("all-reduce", "f32"): 4 * (64 * 256 + 3000 + 100 + 3)}
    assert 0.25 < wire / full_wire < 0.31
    # Blocks so small that it would not pay.
    assert sent(int8_quantize(block_size=1))[0] == full


def test_wide_leaves():
    """In float64 but for the step: the scale is float32's."""
    with jax.enable_x64(True):
        sums = helpers.normal(0, N, 2048) * 1e-3
        rows = Unreduced(sums, np.ones(N), "dp")
        hook = int8_quantize(error_feedback=True)
        mean, state = jit(hook)(rows, hook.init(rows))
        assert (mean.dtype, state.residual.rows.dtype) == (np.float64, np.float64)
        lacks = np.asarray(state.residual.rows).mean(0)
        assert np.max(np.abs(lacks)) > 1e-6
        np.testing.assert_allclose(mean + lacks, sums.mean(0), rtol=0, atol=1e-15)
        # Beyond float32's range no scale is finite, and that shows.
        assert np.all(np.isnan(jit(hook)(Unreduced(sums * 1e50, np.ones(N), "dp"), state)[0]))


@pytest.mark.parametrize(
    "options",
    [{"error_feedback": True, "rounding": "stochastic"}],
    ids=["both"],
)
def test_states_keep_their_type_and_can_be_donated(mesh, options):
    hook = int8_quantize(**options)
    rows = rows_of(mesh, {"w": float_sums(40, 100), "b": float_sums(3)})
    state = hook.init(rows)
    shapes = jax.eval_shape(hook, rows, state)[1]
    assert jax.eval_shape(lambda s: s, state) == shapes
    made = jit(hook.init)(rows)
    jax.tree.map(np.testing.assert_array_equal, made, state)
    expected = hook(rows, state)
    donated = jit(hook, donate_argnums=1)
    mean, after = donated(rows, state)
    helpers.assert_close((mean, after.residual), (expected[0], expected[1].residual), within=1e-2)
    assert int(after.steps) == 1
    if hook.error_feedback:
        assert state.residual.rows["w"].is_deleted()
        assert after.residual.rows["w"].sharding.is_equivalent_to(NamedSharding(mesh, P("dp")), 3)
    donated(rows, after)


def test_in_multisteps(mesh):
    """One mean a window, in the taken branch; its errors do not add up over windows."""
    size, windows = 2048, 30
    targets = helpers.normal(3, size)
    grad_fn = gradaccum.unreduced_value_and_grad(
        lambda w, x: jnp.mean(jnp.sum(w[None] * x, axis=1)), axis_name="dp"
    )
    x = (targets + helpers.normal(4, 2, 16, size)).astype(np.float32)
    on = NamedSharding(mesh, P(None, "dp"))
    exact = windows * x.mean((0, 1), dtype=np.float64)

    def total(**options):
        tx = gradaccum.MultiSteps(
            optax.sgd(1.0), 2, axis_name="dp", comm_hook=int8_quantize(**options)
        )

        def step(carry, x):
            w, state = carry
            updates, state = tx.update(grad_fn(w, x)[1], state, w)
            return (optax.apply_updates(w, updates), state), None

        @jit
        def run(x):
            w = jnp.zeros(size)
            return jax.lax.scan(step, (w, tx.init(w)), jnp.tile(x, (windows, 1, 1)))[0]

        w, state = run(jax.device_put(x, on))
        assert int(state.gradient_step) == windows
        one = jit(step).lower((w, state), jax.device_put(x[0], NamedSharding(mesh, P("dp"))))
        audit.assert_one_reduction(one.compile(), axis_name="dp", mesh=mesh, conditional=True)
        return -np.asarray(w)

    kept, lost = (
        np.max(np.abs(total(error_feedback=feedback) - exact)) for feedback in (True, False)
    )
    assert kept < 0.1
    assert lost > 5 * kept


def test_in_the_decorator(mesh):
    """Without a state, as an option of `accumulate`."""
    del mesh
    loss_fn = lambda w, x: jnp.mean(x @ w)  # noqa: E731
    x = helpers.normal(0, 32, 2048).astype(np.float32)
    fun = gradaccum.accumulate(loss_fn, microbatches=2, axis_name="dp", comm_hook=int8_quantize())
    grad = jit(jax.grad(fun))(np.zeros(2048, np.float32), x)
    off = np.max(np.abs(grad - x.mean(0, dtype=np.float64)))
    assert 1e-4 < off < 0.02


BAD = [
    ({"rounding": "up"}, "int8_quantize: rounding='up'; required: 'nearest' or 'stochastic'"),
    ({"block_size": 0}, "int8_quantize: block_size=0; required: an int of at least 1"),
    ({"block_size": 2.0}, "int8_quantize: block_size=2.0; required: an int of at least 1"),
    ({"min_size": -1}, "int8_quantize: min_size=-1; required: an int of at least 0"),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[str(o) for o, _ in BAD])
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        int8_quantize(**options)


def test_states_that_are_refused(mesh):
    rows = rows_of(mesh, float_sums(2048))
    feedback, stochastic = int8_quantize(error_feedback=True), int8_quantize(rounding="stochastic")
    with pytest.raises(
        TypeError, match=r"a state of type tuple, .*required: what `init` of a hook"
    ):
        feedback(rows, ())
    with pytest.raises(TypeError, match=r"a state of one without residuals, for .*=True"):
        feedback(rows, stochastic.init(rows))
    with pytest.raises(
        TypeError, match=r"a state of one with residuals, for rounding='stochastic'"
    ):
        stochastic(rows, feedback.init(rows))
    with pytest.raises(ValueError, match="the state holds residuals of other gradients"):
        feedback(rows, feedback.init(rows_of(mesh, float_sums(4096))))
    with pytest.raises(ValueError, match=r"int8_quantize: axis_name='mp', but .* over 'dp'"):
        int8_quantize(axis_name="mp")(rows, ())
    with pytest.raises(
        TypeError, match=r"int8_quantize: .*every leaf must be a gradaccum.Unreduced"
    ):
        int8_quantize()(float_sums(3), ())
