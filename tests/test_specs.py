"""in_specs and grad_specs: the forms in which they are taken, and what is refused at decoration."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from specs_model import BATCH, MODEL, PARAMS, SPLIT, decorate, expected, loss_fn, mesh_of, spec

from gradaccum.tensor_parallel import copy_to, gather_from, reduce_from

# --- Forms ---------------------------------------------------------------------------------------

FORMS = {
    "one spec for a tree": ({"block": P("dp"), "b": P("dp")}, P("dp")),
    "a spec for a subtree": ({"block": P("dp"), "b": P()}, {"block": P("dp"), "b": P()}),
    "nested": (SPLIT, SPLIT),
    "none for a leaf": (SPLIT, SPLIT | {"b": None}),
    "none for a subtree": ({"block": P(), "b": P("dp")}, {"block": None, "b": P("dp")}),
    "none for an argument": ({"block": P(), "b": P()}, None),
    "tuples in a spec": (
        {"block": P("dp"), "b": P()},
        {"block": P(("dp",), ()), "b": P(())},
    ),
    "trailing dimensions": ({"block": P("dp"), "b": P()}, {"block": P("dp", None), "b": P(None)}),
}


@pytest.mark.parametrize("named", ["in_specs", "grad_specs"])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_prefix(form, named):
    want, prefix = FORMS[form]
    fun = decorate(**{named: (prefix,)})
    got = layouts.jit(jax.value_and_grad(fun))(PARAMS, BATCH)
    wanted = jax.tree.map(lambda s, x: jax.tree.map(lambda _: s, x), want, PARAMS)
    assert jax.tree.map(spec, got[1]) == wanted
    helpers.assert_close(got, expected(), within=2e-5)


CALLS = {
    "a list": ({"in_specs": [SPLIT]}, (PARAMS, BATCH), {}),
    "the batch too": ({"in_specs": (SPLIT, P("dp"))}, (PARAMS, BATCH), {}),
    "the batch by leaf": ({"in_specs": (SPLIT, {"x": P("dp"), "y": None})}, (PARAMS, BATCH), {}),
    "the batch by keyword": ({"in_specs": (SPLIT, P("dp"))}, (PARAMS,), {"batch": BATCH}),
    "gradients of the first": ({"grad_specs": (SPLIT,)}, (PARAMS, BATCH), {}),
    "gradients of both": ({"grad_specs": (SPLIT, P("dp"))}, (PARAMS, BATCH), {}),
    "gradients as parameters": ({"in_specs": (SPLIT,), "grad_specs": (None,)}, (PARAMS, BATCH), {}),
    "their own": ({"in_specs": (P("dp"),), "grad_specs": (SPLIT,)}, (PARAMS, BATCH), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_forms_of_a_call(name):
    options, args, kwargs = CALLS[name]
    got = layouts.jit(jax.value_and_grad(decorate(**options)))(*args, **kwargs)
    assert jax.tree.map(spec, got[1]) == SPLIT
    helpers.assert_close(got, expected(), within=2e-5)


def test_arguments_after_those_with_specs_have_the_default():
    def scaled(params, batch, scale, *, shift):
        return scale[0] * loss_fn(params, batch) + 0 * shift[0]

    fun = decorate(scaled, in_specs=(SPLIT,))
    call = functools.partial(jax.value_and_grad(fun), shift=jnp.ones(3))
    got = layouts.jit(call)(PARAMS, BATCH, jnp.ones(5))
    helpers.assert_close(got, expected(), within=2e-5)


def test_a_spec_of_a_default_that_the_call_leaves_out():
    def scaled(params, batch, scale=None):
        return loss_fn(params, batch) * (1 if scale is None else scale[0])

    grad = jax.value_and_grad(decorate(scaled, in_specs=(SPLIT, None, P())))
    for args in ((), (jnp.ones(3),)):
        helpers.assert_close(layouts.jit(grad)(PARAMS, BATCH, *args), expected(), within=2e-5)


def test_of_a_method_self_is_position_zero():
    class Net:
        @functools.partial(
            decorate, axis_name="dp", batch_argnums=2, in_specs=(None, SPLIT)
        )  # fmt: skip
        def loss(self, params, batch):
            return loss_fn(params, batch)

    for fun in (jax.value_and_grad(Net().loss), Net().loss.value_and_grad()):
        got = layouts.jit(fun)(PARAMS, BATCH)
        assert jax.tree.map(spec, got[1]) == SPLIT
        helpers.assert_close(got, expected(), within=2e-5)


def test_a_batch_split_over_a_model_axis_too():
    """Its columns: the loss gathers them by hand."""
    mesh = mesh_of(dp=4, mp=2)

    def fun(params, batch):
        x = gather_from(batch["x"], "mp", 1)
        f, g = (functools.partial(o, axis_name="mp") for o in (copy_to, reduce_from))
        return loss_fn(params, batch | {"x": x}, f, g)

    batch_spec = {"x": P("dp", "mp"), "y": P("dp")}
    got = layouts.jit(jax.value_and_grad(decorate(fun, mesh=mesh, in_specs=(MODEL, batch_spec))))(
        PARAMS, BATCH
    )
    assert jax.tree.map(spec, got[1]) == MODEL
    helpers.assert_close(got, expected(), within=2e-5)


# --- Refused at decoration -----------------------------------------------------------------------

SHARDING = NamedSharding(layouts.mesh_of({"dp": 8}), P("dp"))
DECORATION = {
    "an axis that does not exist": (
        {"in_specs": (P("tp", "dp"),)},
        ValueError,
        r"in_specs names 'tp', but the mesh's axes are \(dp=8\)",
    ),
    "axes of gradients that do not exist": (
        {"grad_specs": ({"w": P(("tp", "fsdp"))},)},
        ValueError,
        r"grad_specs names 'tp', 'fsdp', but the mesh's axes are \(dp=8\)",
    ),
    "no mesh": (
        {"axis_name": None, "mesh": None, "in_specs": (P("dp"),)},
        ValueError,
        r"in_specs names 'dp', but axis_name=None means no mesh. Name a data axis",
    ),
    "no mesh for gradients": (
        {"axis_name": None, "mesh": None, "grad_specs": (P("dp"),)},
        ValueError,
        "grad_specs names 'dp', but axis_name=None",
    ),
    "a NamedSharding": (
        {"in_specs": (SHARDING,)},
        TypeError,
        r"in_specs holds NamedSharding\(.*; its leaves must be jax.sharding.PartitionSpec of axis "
        r"names \(of a NamedSharding, its .spec\)",
    ),
    "strings": ({"grad_specs": ({"w": "dp", "b": P()},)}, TypeError, "grad_specs holds 'dp'; its"),
    "UNCONSTRAINED": (
        {"in_specs": (P(P.UNCONSTRAINED, "dp"),)},
        TypeError,
        r"in_specs holds .*UNCONSTRAINED, 'dp'\); its leaves must be",
    ),
    "unreduced": (
        {"grad_specs": (P(unreduced={"dp"}),)},
        TypeError,
        r"grad_specs holds .*unreduced.*; its leaves must be",
    ),
    "one spec alone": (
        {"in_specs": P("dp")},
        TypeError,
        r"in_specs is .*'dp'.*; it must be a tuple with one PartitionSpec, or a pytree prefix of "
        "them, per positional argument",
    ),
    "by name": ({"grad_specs": {"params": P()}}, TypeError, "grad_specs is .*; it must be a tuple"),
    "check_vma": ({"check_vma": "yes"}, TypeError, "check_vma is 'yes'; it must be a bool"),
}


@pytest.mark.parametrize("name", DECORATION)
def test_at_decoration(name):
    options, error, message = DECORATION[name]
    with pytest.raises(error, match=f"^accumulate: {message}"):
        decorate(**options)
