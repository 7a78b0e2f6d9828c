"""What is no communication hook, and what hooks may not return or stand beside."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import layouts
import optax
import pytest
from user_hooks import Halved, grad_fn, mesh_of

import gradaccum
from gradaccum import hooks


@dataclasses.dataclass(frozen=True)
class Returning:
    """Returns what it is told to."""

    what: Any

    def init(self, unreduced):
        return ()

    def __call__(self, unreduced, state):
        return self.what(unreduced)


def _means(u):
    return gradaccum.mean(u)


WRONG = {
    "no pair": (_means, TypeError, r"comm_hook Returning returned .*must return \(mean, state\)"),
    "another structure": (
        lambda u: ({"up": _means(u)["up"]}, ()),
        ValueError,
        "returned a mean of the structure .*Return the same structure, one array a leaf",
    ),
    "still unreduced": (lambda u: (u, ()), TypeError, "still Unreduced: .*'up'"),
    "another shape": (
        lambda u: ({**_means(u), "bias": jnp.zeros((3,))}, ()),
        ValueError,
        r"\['bias'\] has \(3,\), needed \(8,\)",
    ),
    "another state": (
        lambda u: (_means(u), jnp.zeros(())),
        ValueError,
        "returned a state of another form than it was given",
    ),
}


@pytest.mark.parametrize("decorated", [True, False], ids=["decorated", "all_reduce_mean"])
@pytest.mark.parametrize("case", WRONG)
def test_what_a_hook_returns_is_checked(case, decorated):
    what, error, message = WRONG[case]
    hook = Returning(what)
    args = layouts.init_pair(), layouts.pair_batch()
    if decorated:
        loss_fn = gradaccum.accumulate(
            layouts.pair_loss, microbatches=1, mesh=mesh_of(), comm_hook=hook
        )
        with pytest.raises(error, match=message):
            jax.grad(loss_fn)(*args)
        return
    _, grads = jax.eval_shape(grad_fn(mesh_of()), *args)
    tx = gradaccum.all_reduce_mean("dp", mesh=mesh_of(), comm_hook=hook)
    with pytest.raises(error, match=message):
        jax.eval_shape(tx.update, grads, ())


def make_multi_steps(hook, **options):
    return gradaccum.MultiSteps(optax.sgd(1.0), 2, comm_hook=hook, **options)


def make_mean(hook, **options):
    return gradaccum.all_reduce_mean("dp", comm_hook=hook)


@pytest.mark.parametrize("make", [make_multi_steps, make_mean], ids=["MultiSteps", "mean"])
@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (hooks.bf16_compress, r"comm_hook is the class bf16_compress; give an instance"),
        (lambda u, s: (u, s), r"must have init\(unreduced\) -> state and be callable"),
        (Returning([]), "not hashable"),
    ],
    ids=["a class", "no init", "no hash"],
)
def test_what_is_no_hook(make, hook, message):
    with pytest.raises(TypeError, match=message):
        make(hook, axis_name="dp")


def test_a_hook_needs_rows():
    with pytest.raises(ValueError, match=r"comm_hook=allreduce\(.*without axis_name"):
        make_multi_steps(hooks.allreduce())


@pytest.mark.parametrize("hook", [Halved(), hooks.powersgd(), hooks.int8_quantize(seed=1)])
def test_the_decorator_refuses_a_state(hook):
    loss_fn = gradaccum.accumulate(
        layouts.pair_loss, microbatches=1, mesh=mesh_of(), comm_hook=hook
    )
    args = layouts.init_pair(), layouts.pair_batch()
    if isinstance(hook, hooks.int8_quantize):  # has none, as it is
        jax.eval_shape(jax.grad(loss_fn), *args)
        return
    with pytest.raises(ValueError, match=r"has a state of \d arrays.*MultiSteps"):
        jax.grad(loss_fn)(*args)


def test_reduce_dtype_beside_a_hook():
    loss_fn = gradaccum.accumulate(
        layouts.pair_loss,
        microbatches=1,
        mesh=mesh_of(),
        reduce_dtype=jnp.bfloat16,
        comm_hook=hooks.allreduce(),
    )
    with pytest.raises(ValueError, match=r"reduce_dtype=bfloat16 .* beside comm_hook allreduce"):
        jax.grad(loss_fn)(layouts.init_pair(), layouts.pair_batch())
    _, grads = jax.eval_shape(
        grad_fn(mesh_of(), reduce_dtype=jnp.bfloat16), layouts.init_pair(), layouts.pair_batch()
    )
    tx = gradaccum.all_reduce_mean("dp", mesh=mesh_of(), comm_hook=hooks.allreduce())
    with pytest.raises(ValueError, match=r"reduce_dtype=bfloat16 .* beside comm_hook allreduce"):
        jax.eval_shape(tx.update, grads, ())


def test_unknown_axes_of_a_hook():
    _, grads = jax.eval_shape(grad_fn(mesh_of()), layouts.init_pair(), layouts.pair_batch())
    hook = hooks.bf16_compress(axis_name="replica")
    with pytest.raises(ValueError, match=re.escape("axis_name='replica', but the gradients are")):
        jax.eval_shape(lambda g: hook(g, ()), grads)
