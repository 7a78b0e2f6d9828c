"""The trees that hooks are given, for each kind of argument, and what they may return."""

import functools

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import gradaccum

X = jnp.array([1.0, 2.0, 3.0, 4.0])


def loss_fn(w, x):
    return jnp.mean(w * x)


def decorated(fun=loss_fn, **options):
    return gradaccum.accumulate(fun, microbatches=2, axis_name=None, **options)


# --- What they are given --------------------------------------------------------------------------


def seen_by_hook(fun, differentiate, *args, **options):
    """Returns the tree that a hook is given."""
    seen = []

    def hook(grads, *, index):
        assert (index.shape, index.dtype) == ((), jnp.int32)
        seen.append(jax.tree.map(lambda g: g.dtype.name, grads))
        return grads

    def on_mean(grads):
        seen.append(jax.tree.map(lambda g: g.dtype.name, grads))
        return grads

    differentiate(decorated(fun, hook=hook, post_accumulate_hook=on_mean, **options))(*args)
    if seen:
        first, second = seen  # each is traced once
        assert first == second
        return first
    return None


def two(params, x, *, scale):
    return jnp.mean(params["w"] * x) * scale["s"] + params.get("n", 0)


def test_a_hook_sees_the_differentiated_arguments_alone():
    f32 = "float32"
    params, scale = {"w": jnp.float32(1), "n": 3}, {"s": jnp.ones(()), "t": jnp.int32(2)}
    mixed = {"w": jnp.float32(1), "n": jnp.int32(3)}
    see = functools.partial(seen_by_hook, two)

    def grads(*, of, allow_int=False):
        def differentiate(f):
            g = lambda p, x, s: f(p, x, scale=s)  # noqa: E731
            return jax.grad(g, argnums=of, allow_int=allow_int)

        return differentiate

    assert see(lambda f: lambda p: f.value_and_grad()(p, X, scale=scale), {"w": 1.0}) == {"w": f32}
    assert see(grads(of=0, allow_int=True), mixed, X, scale) == {"w": f32, "n": None}
    assert see(grads(of=2, allow_int=True), params, X, scale) == {"s": f32, "t": None}
    both = see(grads(of=(2, 0), allow_int=True), mixed, X, scale)
    assert both == ({"w": f32, "n": None}, {"s": f32, "t": None})  # in positional order
    # A batch argument's gradient is each example's own: it is not there, and changes nothing.
    assert see(grads(of=(0, 1), allow_int=True), mixed, X, scale) == {"w": f32, "n": None}
    assert see(grads(of=1), params, X, scale) is None
    # What is held constant is None, in its place.
    stopped = lambda f: jax.grad(lambda w: f({"w": w, "n": jnp.ones(())}, X, scale=scale))  # noqa: E731
    assert see(stopped, 1.0) == {"w": f32, "n": None}


@pytest.mark.parametrize("dtype", [None, jnp.float16])
def test_a_hook_sees_the_accumulators_dtype(dtype):
    got = seen_by_hook(
        loss_fn, jax.grad, jnp.bfloat16(1), X.astype(jnp.bfloat16), accumulator_dtype=dtype
    )
    assert got == ("float32" if dtype is None else "float16")


class Module(eqx.Module):
    w: jax.Array
    act: callable
    n: int

    def __call__(self, x):
        return self.act(self.w * x)


def test_an_equinox_modules_static_leaves_are_none_in_a_hook():
    fun = lambda model, x: jnp.mean(model(x))  # noqa: E731
    model = Module(jnp.float32(0), jnp.sin, 3)
    seen = seen_by_hook(fun, eqx.filter_value_and_grad, model, X)
    assert isinstance(seen, Module)
    assert (seen.w, seen.act, seen.n) == ("float32", None, None)
    doubled = decorated(fun, hook=lambda g, *, index: jax.tree.map(lambda x: 2 * x, g))
    assert eqx.filter_grad(doubled)(model, X).w == 5


def test_an_nnx_modules_gradients_pass_through_a_hook():
    fun = lambda model, x: jnp.mean(model(x[:, None]))  # noqa: E731
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    want = nnx.value_and_grad(fun)(model, X)[1]
    doubled = decorated(fun, hook=lambda g, *, index: jax.tree.map(lambda x: 2 * x, g))
    got = nnx.value_and_grad(doubled)(model, X)[1]
    helpers.assert_close(jax.tree.leaves(got), [2 * x for x in jax.tree.leaves(want)])


# --- What they return -----------------------------------------------------------------------------


def tree_loss(params, x):
    return jnp.mean(params["w"] * x) + params["b"].sum()


RETURNED = {
    "none": (lambda g: None, r"returned None\. Return gradients of the structure and shapes"),
    "missing": (lambda g: {"w": g["w"]}, r"returned nothing at grads\['b'\]\."),
    "more": (lambda g: g | {"c": g["w"]}, r"returned something at grads\['c'\]\."),
    "both": (
        lambda g: {"w": g["w"], "c": 0.0},
        r"returned nothing at .*'b'\] and something at .*'c'",
    ),
    "absent": (lambda g: {"w": None, "b": g["b"]}, r"returned nothing at grads\['w'\]\."),
    "list": (lambda g: list(g.items()), r"returned nothing at grads\['b'\], grads\['w'\] and some"),
    "shape": (
        lambda g: {"w": g["w"][None], "b": g["b"][:2]},
        r"returned grads\['b'\] is float32\[2\] instead of float32\[3\]; "
        r"grads\['w'\] is float32\[1\] instead of float32\[\]",
    ),
    "complex": (
        lambda g: g | {"w": 1j * g["w"]},
        r"returned .*'w'\] is complex64\[\] instead",
    ),
    "string": (lambda g: g | {"w": "w"}, r"returned grads\['w'\] is a str instead of float32\[\]"),
}


@pytest.mark.parametrize("kind", ["hook", "post_accumulate_hook"])
@pytest.mark.parametrize("name", RETURNED)
def test_what_a_hook_returns_is_checked(kind, name):
    change, match = RETURNED[name]

    def per_microbatch(grads, *, index):
        del index
        return change(grads)

    hook = per_microbatch if kind == "hook" else change
    name = "per_microbatch" if kind == "hook" else "<lambda>"
    fun = decorated(tree_loss, **{kind: hook})
    with pytest.raises(ValueError, match=rf"accumulate: {kind} .*{name} {match}"):
        jax.grad(fun)({"w": 1.0, "b": jnp.ones(3)}, X)


def test_a_narrower_result_and_a_python_number_are_cast_back():
    half = lambda g, *, index: {"w": 7, "b": g["b"].astype(jnp.bfloat16)}  # noqa: E731
    got = jax.grad(decorated(tree_loss, hook=half))({"w": 1.0, "b": jnp.ones(3)}, X)
    assert got["w"] == 7
    assert got["b"].dtype == jnp.float32
    assert got["b"].tolist() == [1.0, 1.0, 1.0]
