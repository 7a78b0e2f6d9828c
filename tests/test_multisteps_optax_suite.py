"""optax's own tests of its MultiSteps run with ours in its place; and what its users rely on."""

import copy
import functools
import importlib.util
import inspect
import pathlib
import re
import types
import unittest

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_close
from optax.transforms import _accumulation

import gradaccum

MultiSteps = gradaccum.MultiSteps


# --- The suite -----------------------------------------------------------------------------------


@functools.cache
def suite():
    """Returns optax's test case, its names bound to our MultiSteps, and a list of those made."""
    path = pathlib.Path(optax.__path__[0], "transforms", "_accumulation_test.py")
    spec = importlib.util.spec_from_file_location("optax_accumulation_test", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = []

    class Jitted(MultiSteps):
        """Eager calls, as one of the tests makes them, compile their cond anew: half a minute."""

        def gradient_transformation(self):
            made.append(self)
            return optax.GradientTransformation(self.init, jax.jit(self.update))

    module._accumulation = types.SimpleNamespace(**vars(_accumulation) | {"MultiSteps": Jitted})
    return module.AccumulationTest, made


NAMES = unittest.TestLoader().getTestCaseNames(suite()[0])


def test_the_suite_is_all_there():
    assert len(NAMES) >= 12
    about = {n.rstrip("0123456789") for n in NAMES if "multi_steps" in n}
    assert about >= {
        "test_multi_steps",
        "test_multi_steps_every_k_schedule",
        "test_multi_steps_scan_dtype_stability",
        "test_multi_steps_zero_nans",
        "test_multi_steps_computes_mean",
        "test_multi_steps_skip_not_finite",
        "test_multi_steps_mixed_precision",
    }


@pytest.mark.parametrize("name", NAMES)
def test_optax(name):
    case, made = suite()
    before, result = len(made), unittest.TestResult()
    case(name).run(result)
    assert result.testsRun == 1
    assert [text for _, text in result.errors + result.failures] == []
    assert result.skipped == []
    assert (len(made) > before) == ("multi_steps" in name)


# --- A drop-in -----------------------------------------------------------------------------------


def run(tx, grads, params, **extra):
    """Returns parameters after each call, and the state."""
    state, step, seen = tx.init(params), jax.jit(tx.update), []
    for i, grad in enumerate(grads):
        updates, state = step(grad, state, params, **{n: v[i] for n, v in extra.items()})
        params = optax.apply_updates(params, updates)
        seen.append(params)
    return seen, state


def test_o20_every_argument_that_is_documented_exists():
    """optax's docstring gives its `skip_large_updates` an argument by a name that it lacks."""
    signature = inspect.signature(MultiSteps.__new__).parameters
    args = inspect.getdoc(MultiSteps).split("Args:")[1].split("Raises:")[0]
    assert re.findall(r"^  (\w+):", args, re.M) == [n for n in signature if n != "cls"]
    theirs = list(inspect.signature(optax.MultiSteps.__init__).parameters)[1:]
    assert list(signature)[1 : 1 + len(theirs)] == theirs
    assert set(optax.MultiStepsState._fields) <= set(gradaccum.MultiStepsState._fields)
    methods = {n for n in vars(optax.MultiSteps) if not n.startswith("_")}
    assert all(hasattr(MultiSteps(optax.sgd(1.0), 2), n) for n in methods)
    args = inspect.getdoc(gradaccum.all_reduce_mean).split("Args:")[1].split("Returns:")[0]
    named = list(inspect.signature(gradaccum.all_reduce_mean).parameters)
    assert re.findall(r"^  (\w+):", args, re.M) == named


def test_it_is_a_transformation_and_a_pytree_of_two_functions():
    tx = MultiSteps(optax.sgd(0.5), 2)
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert tx.gradient_transformation() is tx
    init, update = tx
    assert (init, update) == (tx.init, tx.update)
    for other in (jax.tree.map(lambda f: f, [tx])[0], copy.copy(tx), copy.deepcopy(tx)):
        assert isinstance(other, MultiSteps)
        seen, state = run(other, [jnp.float32(x) for x in (1, 3)], jnp.float32(0))
        assert seen == [0, -1]
        assert bool(other.has_updated(state))
        assert other.inner_opt.init is not None


K = {
    "zero": (0, ValueError, "gives k = 0 at gradient step 0 and after; it must be a"),
    "negative": (-2, ValueError, "gives k = -2"),
    "array of zero": (jnp.int32(0), ValueError, "gives k = .*0"),
    "beyond int32": (2**31, ValueError, "gives k = 2147483648"),
    "numpy's, beyond int32": (np.int64(2**40), ValueError, "gives k = .*1099511627776"),
    "bool": (True, TypeError, "every_k_schedule is True; it must be an int >= 1, or a function"),
    "float": (2.5, TypeError, "every_k_schedule is 2.5"),
    "text": ("3", TypeError, "every_k_schedule is '3'"),
    "none": (None, TypeError, "every_k_schedule is None"),
    "arrays": (jnp.ones(2, jnp.int32), TypeError, "every_k_schedule is Array"),
}  # fmt: skip


@pytest.mark.parametrize("name", K)
def test_o11_a_k_that_is_none(name):
    k, error, match = K[name]
    with pytest.raises(error, match=match):
        MultiSteps(optax.sgd(1.0), k)


@pytest.mark.parametrize("k", [0, -1, 2.5, "3", None, True, float("nan"), np.zeros(2)], ids=repr)
def test_o11_a_schedule_that_gives_no_k(k):
    tx = MultiSteps(optax.sgd(1.0), lambda step: k)
    with pytest.raises(ValueError, match=r"gives k = .* at gradient step 0; it must be a whole"):
        tx.init(jnp.ones(2))
    later = MultiSteps(optax.sgd(1.0), lambda step: jnp.where(step == 0, 1, 0))
    state = later.init(jnp.ones(2))
    _, state = later.update(jnp.ones(2), state)
    with pytest.raises(ValueError, match=r"gives k = .*0.* at gradient step 1;"):
        later.update(jnp.ones(2), state)


@pytest.mark.parametrize(
    "k", [2, np.int64(2), np.uint8(2), jnp.int32(2)], ids=lambda k: type(k).__name__
)
@pytest.mark.parametrize("way", ["constant", "schedule"])
def test_whole_numbers_of_any_type(k, way):
    tx = MultiSteps(optax.sgd(1.0), k if way == "constant" else lambda step: k)
    seen, _ = run(tx, [jnp.float32(x) for x in (1, 3, 5, 7)], jnp.float32(0))
    assert seen == [0, -2, -2, -8]


# --- What the inner optimizer sees ---------------------------------------------------------------


def test_o14_schedules_count_steps_from_zero():
    """Also injected hyperparameters: the first step is made with the value of step 0."""
    rate = lambda step: 1.0 + step  # noqa: E731
    for inner in (optax.sgd(rate), optax.inject_hyperparams(optax.sgd)(rate)):
        seen, _ = run(MultiSteps(inner, 2), [jnp.float32(1)] * 4, jnp.float32(0))
        assert seen == [0, -1, -1, -3]


def test_o15_o24_the_mean_is_clipped_and_not_its_parts():
    """Gradients 1 and -0.75: clipped to 0.5 each their mean is 0, the mean 0.125 is not clipped."""
    grads = [jnp.float32(1), jnp.float32(-0.75)]
    clip = optax.clip_by_global_norm(0.5)
    inside, _ = run(MultiSteps(optax.chain(clip, optax.sgd(1.0)), 2), grads, jnp.float32(0))
    before, _ = run(optax.chain(clip, MultiSteps(optax.sgd(1.0), 2)), grads, jnp.float32(0))
    assert (float(inside[-1]), float(before[-1])) == (-0.125, 0)


def test_o16_weight_decay_is_gated():
    """A chain element that hands on zeros lets adamw decay in each of 13 calls."""
    adamw = optax.adamw(0.1, weight_decay=0.1)
    grads, params = [jnp.float32(2)] * 13, jnp.float32(1)
    (*_, last), _ = run(MultiSteps(adamw, 13), grads, params)
    (*_, wrong), _ = run(optax.chain(optax.apply_every(13), adamw), grads, params)
    changes = [round(float(x - params), 3) for x in (last, wrong)]
    assert changes == [-0.110, -0.171]


def test_o18_an_average_of_parameters_is_gated_by_has_updated():
    """After one update and three calls of the next window."""
    tx, params = MultiSteps(optax.sgd(1.0), 4), jnp.float32(0)
    ema = optax.ema(0.9, debias=False)
    state, average, every = tx.init(params), ema.init(params), ema.init(params)
    for _ in range(7):
        updates, state = tx.update(jnp.float32(-1), state, params)
        params = optax.apply_updates(params, updates)
        _, every = ema.update(params, every)
        _, new = ema.update(params, average)
        choose = functools.partial(jnp.where, tx.has_updated(state))
        average = jax.tree.map(choose, new, average)
    assert [round(float(x.ema), 3) for x in (average, every)] == [0.1, 0.344]
    assert [int(x.count) for x in (average, every)] == [1, 7]


def test_o19_extra_arguments_are_those_of_the_call_that_updates():
    def update(updates, state, params=None, *, value, name, **extra):
        assert (name, extra) == ("static", {})
        return updates * value, value

    inner = optax.GradientTransformationExtraArgs(lambda _: jnp.float32(0), update)
    tx, params = MultiSteps(inner, 2), jnp.float32(0)
    state = tx.init(params)
    step = jax.jit(lambda g, s, value: tx.update(g, s, params, value=value, name="static"))
    for value, want in ((3.0, 0), (5.0, 5), (7.0, 5), (-1.0, -1)):
        updates, state = step(jnp.float32(1), state, value)
        assert float(state.inner_opt_state) == want
        assert float(updates) == (want if tx.has_updated(state) else 0)
    updates, state = tx.flush(state, params, value=9.0, name="static")
    assert (float(updates), float(state.inner_opt_state)) == (0, -1)


def test_a_plateau_is_seen_once_a_window():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = MultiSteps(optax.chain(optax.sgd(1.0), plateau), 2)
    _, state = run(tx, [jnp.float32(1)] * 4, jnp.float32(0), value=[9.0, 1.0, 9.0, 2.0])
    assert float(state.inner_opt_state[1].best_value) == 1
    assert float(state.inner_opt_state[1].scale) == 0.5


# --- Dtypes --------------------------------------------------------------------------------------


def test_d1_a_thousand_bfloat16_gradients():
    """A bfloat16 accumulator stops at 256."""
    params, one = jnp.zeros(3, jnp.bfloat16), jnp.ones(3, jnp.bfloat16)
    means = {}
    for dtype in (None, "bfloat16"):
        tx = MultiSteps(optax.identity(), 1024, accumulator_dtype=dtype)
        last = lambda s, _, tx=tx: tx.update(one, s, params)[::-1]  # noqa: E731
        _, updates = jax.jit(lambda s, last=last: jax.lax.scan(last, s, length=1024))(
            tx.init(params)
        )
        assert updates.dtype == jnp.bfloat16
        means[dtype] = updates[-1].tolist()
    assert means == {None: [1.0] * 3, "bfloat16": [0.25] * 3}


DTYPES = {
    "float32": (np.float32, None, np.float32),
    "bfloat16": (jnp.bfloat16, None, np.float32),
    "float16": (np.float16, None, np.float32),
    "bfloat16 accumulator": (np.float32, "bfloat16", jnp.bfloat16),
    "complex64": (np.complex64, None, np.complex64),
    "complex64 in bfloat16": (np.complex64, "bfloat16", np.complex64),
    "float64": (np.float64, None, np.float64),
    "complex128": (np.complex128, None, np.complex128),
    "float64 in float32": (np.float64, "float32", np.float32),
}


@pytest.mark.parametrize("rows", [False, True], ids=["plain", "rows"])
@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(name, rows):
    """Of a leaf beside a float32 one: its accumulator, its update, the value of the mean."""
    dtype, given, accumulator = DTYPES[name]
    mesh = helpers.data_mesh(8)
    with jax.enable_x64(("64" in np.dtype(dtype).name and dtype != np.complex64) or "128" in name):
        values = helpers.normal(0, 3, 8, 4)
        values = values + (1j * helpers.normal(1, 3, 8, 4) if "complex" in name else 0)
        params = {"a": jnp.zeros(4, dtype), "f": jnp.zeros((), np.float32)}
        options = {"axis_name": "dp", "mesh": mesh} if rows else {}
        tx = MultiSteps(optax.identity(), 3, accumulator_dtype=given, **options)
        state, step = tx.init(params), jax.jit(tx.update)
        assert {n: x.dtype for n, x in state.acc_grads.items()} == {
            "a": accumulator, "f": jnp.bfloat16 if given == "bfloat16" else np.float32,
        }  # fmt: skip
        for own in values:
            grads = {
                "a": jnp.asarray(own.astype(dtype)),
                "f": jnp.asarray(own.real[:, 0], np.float32),
            }
            if rows:
                grads = {n: gradaccum.Unreduced(g, jnp.ones(8), "dp") for n, g in grads.items()}
            else:
                grads = jax.tree.map(lambda g: g.mean(0), grads)
            updates, state = step(grads, state, params)
        assert {n: x.dtype for n, x in updates.items()} == {"a": dtype, "f": np.float32}
        narrow = jnp.bfloat16 if given == "bfloat16" and accumulator == jnp.bfloat16 else dtype
        narrow = np.float32 if given == "float32" else narrow
        want = values.mean((0, 1)) if "complex" in name else values.real.mean((0, 1))
        within = 2 * helpers.TOLERANCE.get(np.dtype(narrow).name, 1e-12)
        assert_close(updates["a"], want, within=within)
        assert all(not np.any(x) for x in jax.tree.leaves((state.acc_grads, state.weight)))
