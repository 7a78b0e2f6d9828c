"""in_specs and grad_specs: the forms in which they are taken, and what is refused, with numbers."""

import functools
import re

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from gradaccum.tensor_parallel import copy_to, gather_from, reduce_from

B = 32
PARAMS = {
    "block": {"w": helpers.normal(0, 8, 16), "v": helpers.normal(1, 16, 8)},
    "b": helpers.normal(2, 8),
}
PARAMS = jax.tree.map(lambda x: x.astype(np.float32) / 2, PARAMS)
BATCH = {n: helpers.normal(i, B, 8).astype(np.float32) for i, n in enumerate("xy", 7)}
REPLICATED = {"block": {"w": P(), "v": P()}, "b": P()}
SPLIT = {"block": {"w": P(None, "dp"), "v": P("dp")}, "b": P()}
MODEL = {"block": {"w": P(None, "mp"), "v": P("mp")}, "b": P()}


def loss_fn(params, batch, f=lambda x: x, g=lambda x: x):
    h = jnp.tanh(f(batch["x"]) @ params["block"]["w"])
    y = g(h @ params["block"]["v"]) + params["b"][None]
    return jnp.mean(jnp.sin(y) * batch["y"])


@functools.cache
def mesh_of(kind=AxisType.Auto, **sizes):
    return layouts.mesh_of(sizes or {"dp": 8}, kind)


def decorate(fun=loss_fn, **options):
    return gradaccum.accumulate(
        fun, **{"microbatches": 2, "axis_name": "dp", "mesh": mesh_of()} | options
    )


@functools.cache
def expected():
    return layouts.in_float64(jax.value_and_grad(loss_fn), PARAMS, BATCH)


def spec(x):
    """Returns the spec of an array, by name alone."""
    dims = [d if d is None or isinstance(d, str) else tuple(d) for d in x.sharding.spec]
    while dims and dims[-1] is None:
        dims.pop()
    return P(*dims)


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


# --- Refused at the call -------------------------------------------------------------------------

ODD = {"block": {"w": np.ones((6, 12)), "v": np.ones((12, 8))}, "b": np.ones(8)}
X = {"x": np.ones((B, 8)), "y": np.ones((B, 8))}
DM, RF = {"dp": 4, "mp": 2}, {"replica": 2, "fsdp": 4}
BOTH = ("replica", "fsdp")


def of(w=None, v=None, b=None):
    return {"block": {"w": w, "v": v}, "b": b}


FIRST = "Write the model axis first, e.g. PartitionSpec(('mp', 'dp')): then the parts"
# mesh, options, message, remedy, with a spec as {...}
AT_CALL = {
    "axes that do not exist": (
        DM,
        {"in_specs": (of(w=P("tp"), b=P("fsdp")),), "grad_specs": (of(w=P("tp"), v=P("pp")),)},
        "in_specs of params['b'], shape (8,), is {P('fsdp')}: the mesh has no axis 'fsdp'; "
        "grad_specs of params['block']['v'], shape (16, 8), is {P('pp')}: the mesh has no axis "
        "'pp'; in_specs of params['block']['w'], shape (8, 16), is {P('tp')}: the mesh has no axis "
        "'tp'; ",
        "The mesh's axes are (dp=4, mp=2).",
    ),
    "longer than the rank": (
        DM,
        {"in_specs": (of(w=P(None, None, "dp")),), "grad_specs": (of(b=P(None, "dp")),)},
        "grad_specs of params['b'], shape (8,), is {P(None, 'dp')}: 2 dimensions, but the array's "
        "rank is 1; in_specs of params['block']['w'], shape (8, 16), is {P(None, None, 'dp')}: 3 "
        "dimensions, but the array's rank is 2",
        "Give such leaves a spec of their own, e.g. PartitionSpec().",
    ),
    "a prefix longer than the rank of some": (
        DM,
        {"in_specs": (P(None, "dp"),)},
        "in_specs of params['b'], shape (8,), is {P(None, 'dp')}: 2 dimensions, but the array's "
        "rank is 1.",
        "Give such leaves a spec of their own",
    ),
    "an axis twice": (
        DM,
        {"in_specs": (of(w=P("dp", "dp"), b=P(("dp", "dp"))),)},
        "in_specs of params['b'], shape (8,), is {P(('dp', 'dp'))}: an axis is named twice; "
        "in_specs of params['block']['w'], shape (8, 16), is {P('dp', 'dp')}: an axis is named "
        "twice",
        "An axis splits one dimension only.",
    ),
    "the batch on no axis": (
        DM,
        {"in_specs": (None, {"x": P("dp"), "y": P()})},
        "in_specs of batch['y'], shape (32, 8), is {P()}: the data axes split axis 0 of a batch",
        "Give {P('dp')}",
    ),
    "the batch on one data axis of two": (
        RF,
        {"axis_name": BOTH, "in_specs": (None, P("fsdp"))},
        "in_specs of batch['x'], shape (32, 8), is {P('fsdp')}: the data axes split axis 0",
        "Give {P(('replica', 'fsdp'))}",
    ),
    "the batch on its data axes in another order": (
        RF,
        {"axis_name": BOTH, "in_specs": (None, P(BOTH[::-1]))},
        "in_specs of batch['x'], shape (32, 8), is {P(('fsdp', 'replica'))}: the data axes split",
        "Give {P(('replica', 'fsdp'))}",
    ),
    "the batch on a data axis and a model axis": (
        DM,
        {"in_specs": (None, P(("dp", "mp")))},
        "in_specs of batch['x'], shape (32, 8), is {P(('dp', 'mp'))}: the data axes split axis 0",
        "Give {P('dp')}",
    ),
    "the batch along its columns": (
        DM,
        {"in_specs": (None, P(None, "dp"))},
        "in_specs of batch['x'], shape (32, 8), is {P(None, 'dp')}: the data axes split axis 0",
        "Give {P('dp')}",
    ),
    "gradients of the batch elsewhere": (
        DM,
        {"grad_specs": (None, P())},
        "grad_specs of batch['x'], shape (32, 8), is {P()}: the data axes split axis 0",
        "Give {P('dp')}",
    ),
    "a data axis before a model axis": (
        DM,
        {"in_specs": (of(w=P(None, ("dp", "mp"))),)},
        "in_specs of params['block']['w'], shape (8, 16), is {P(None, ('dp', 'mp'))}: a data axis "
        "before a model axis in one dimension",
        FIRST,
    ),
    "a data axis before a model axis, one of size 1 between": (
        {"dp": 2, "pp": 1, "mp": 2},
        {"in_specs": (MODEL,), "grad_specs": (of(v=P(("dp", "pp", "mp"))),)},
        "grad_specs of params['block']['v'], shape (16, 8), is {P(('dp', 'pp', 'mp'))}: a data "
        "axis before a model axis in one dimension",
        FIRST,
    ),
    "the same of a gradient": (
        DM,
        {"in_specs": (MODEL,), "grad_specs": (of(w=P(None, ("dp", "mp")), v=P("mp")),)},
        "grad_specs of params['block']['w'], shape (8, 16), is {P(None, ('dp', 'mp'))}: a data",
        FIRST,
    ),
    "a gradient off its model axis": (
        DM,
        {"in_specs": (MODEL,), "grad_specs": (of(w=P("dp"), v=P("mp", "dp")),)},
        "grad_specs of params['block']['w'], shape (8, 16), is {P('dp')}: its model axes are not "
        "those of in_specs, {P(None, 'mp')}",
        "Only data axes can be added",
    ),
    "a gradient on another dimension's model axis": (
        DM,
        {"in_specs": (MODEL,), "grad_specs": (of(w=P("mp"), v=P(None, "mp")),)},
        "grad_specs of params['block']['v'], shape (16, 8), is {P(None, 'mp')}: its model axes are "
        "not those of in_specs, {P('mp', None)}; grad_specs of params['block']['w']",
        "Only data axes can be added",
    ),
    "an automatic model axis on the same dimension": (
        DM,
        {"grad_specs": (of(w=P(None, ("mp", "dp")), v=P(("dp", "mp"))),)},
        "grad_specs of params['block']['v'], shape (16, 8), is {P(('dp', 'mp'))}: axis 0 is split "
        "over mp too, an automatic model axis; grad_specs of params['block']['w'], shape (8, 16), "
        "is {P(None, ('mp', 'dp'))}: axis 1 is split over mp too, an automatic model axis",
        "Put the data axis on another dimension, or name the model axis in in_specs.",
    ),
    "a structure that is not the argument's": (
        DM,
        {"in_specs": ({"block": P(), "bias": P()},)},
        "in_specs[0] is not a pytree prefix of its argument: it has nothing for ['b']; the "
        "argument has no ['bias']",
        "",
    ),
    "a structure without a leaf": (
        DM,
        {"grad_specs": (None, {"x": P("dp")})},
        "grad_specs[1] is not a pytree prefix of its argument: it has nothing for ['y']",
        "",
    ),
    "a structure that is too deep": (
        DM,
        {"in_specs": (of(b=[P()]),)},
        "in_specs[0] is not a pytree prefix of its argument: it has nothing for ['b']; the "
        "argument has no ['b'][0]",
        "",
    ),
    "more than arguments": (
        DM,
        {"in_specs": (SPLIT, P("dp"), None, None, P())},
        "in_specs has 5 entries, but this call has 4 positional arguments.",
        "Give one PartitionSpec, or prefix, for each.",
    ),
}
DIVIDED = {
    "not divisible": (
        {"dp": 8},
        {"in_specs": (of(w=P("dp"), v=P("dp"), b=P("dp")),)},
        "in_specs of params['block']['v'], shape (12, 8), is {P('dp')}: axis 0 (12) is not "
        "divisible by dp = 8 (padded: 16); in_specs of params['block']['w'], shape (6, 12), is "
        "{P('dp')}: axis 0 (6) is not divisible by dp = 8 (padded: 8)",
        "Split another dimension, leave them replicated, PartitionSpec(), or pad them.",
    ),
    "gradients not divisible": (
        {"dp": 8},
        {"grad_specs": (of(w=P(None, "dp")),)},
        "grad_specs of params['block']['w'], shape (6, 12), is {P(None, 'dp')}: axis 1 (12) is "
        "not divisible by dp = 8",
        "Split another dimension",
    ),
    "not divisible by a product": (
        RF,
        {"axis_name": BOTH, "in_specs": (of(v=P(BOTH)),)},
        "in_specs of params['block']['v'], shape (12, 8), is {P(('replica', 'fsdp'))}: axis 0 (12) "
        "is not divisible by replica * fsdp = 2 * 4 = 8",
        "Split another dimension",
    ),
    "not divisible by a model axis": (
        {"dp": 2, "mp": 4},
        {"in_specs": (of(w=P("mp"), v=P("mp")),)},
        "in_specs of params['block']['w'], shape (6, 12), is {P('mp')}: axis 0 (6) is not "
        "divisible by mp = 4",
        "Split another dimension",
    ),
}


def in_full(message):
    """Returns a message as a pattern, its {specs} as this jax writes them."""
    parts = re.split(r"\{(P\(.*?\))\}", message)
    return "".join(
        re.escape(repr(eval(part)) if i % 2 else part)  # our own text
        for i, part in enumerate(parts)
    )


@pytest.mark.parametrize("how", ["grad", "method", "call"])
@pytest.mark.parametrize("name", [*AT_CALL, *DIVIDED])
def test_at_the_call(name, how):
    """With set_mesh, so that the mesh is not known at decoration; every bad leaf is named."""
    params = PARAMS if name in AT_CALL else ODD
    sizes, options, message, remedy = (AT_CALL | DIVIDED)[name]
    fun = decorate(**{"mesh": None} | options)
    run = {"grad": jax.jit(jax.grad(fun)), "method": fun.value_and_grad(), "call": fun}[how]
    with (
        jax.set_mesh(mesh_of(**sizes)),
        pytest.raises(
            ValueError, match=f"^accumulate: .*{in_full(message)}.*{in_full(remedy)}"
        ) as e,
    ):
        run(params, X)
    assert len(str(e.value)) < 900


def test_batch_columns_that_a_model_axis_does_not_divide():
    fun = decorate(mesh=mesh_of(dp=4, mp=2), in_specs=(MODEL, P("dp", "mp")))
    batch = {"x": np.ones((B, 9)), "y": np.ones((B, 9))}
    message = (
        "in_specs of batch['x'], shape (32, 9), is {P('dp', 'mp')}: axis 1 (9) is not divisible by "
        "mp = 2"
    )
    with pytest.raises(ValueError, match=f"^accumulate: {in_full(message)}"):
        jax.grad(fun)(PARAMS, batch)


# --- Explicit axes -------------------------------------------------------------------------------


def explicit(specs, **sizes):
    mesh = mesh_of(AxisType.Explicit, **sizes)
    return mesh, layouts.place(PARAMS, mesh, specs)


@pytest.mark.parametrize("given", ["grad_specs", "in_specs"])
def test_on_explicit_axes_jax_grad_refuses_gradients_laid_out_otherwise(given):
    mesh, params = explicit(REPLICATED)
    fun = decorate(mesh=None, **{given: (SPLIT,)})
    message = (
        r"params\['block'\]\['v'\], float32\[16,8\], has its gradient as .*'dp'.*; "
        r"params\['block'\]\['w'\], float32\[8,16\], has its gradient as .*None, 'dp'\)\. "
        "A cotangent must have its primal's type, on Explicit axes its sharding. Use "
        r"loss_fn.value_and_grad\(\.\.\.\)"
    )
    with jax.set_mesh(mesh):
        for run in (jax.grad(fun), jax.jit(jax.value_and_grad(fun))):
            with pytest.raises(ValueError, match=f"^accumulate: {message}"):
                run(params, BATCH)
        got = layouts.jit(fun.value_and_grad())(params, BATCH)
    assert jax.tree.map(spec, got[1]) == SPLIT
    helpers.assert_close(got, expected(), within=2e-5)


@pytest.mark.parametrize("given", ["grad_specs", "in_specs"])
def test_on_explicit_axes_a_model_axis_of_the_type_on_a_data_axis_dimension(given):
    mesh, params = explicit(MODEL, dp=4, mp=2)
    fun = decorate(mesh=None, **{given: (SPLIT,)})
    message = (
        rf"{given} of params\['block'\]\['v'\], shape \(16, 8\), is .*'dp'.*: axis 0 is split over "
        r"mp too, an automatic model axis; .*\['w'\], shape \(8, 16\), is .*: axis 1 is split"
    )
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=f"^accumulate: {message}"):
        fun.value_and_grad()(params, BATCH)


def test_in_an_outer_region_jax_grad_refuses_gradients_of_another_shape():
    mesh, fun = mesh_of(), decorate(mesh=None, grad_specs=(SPLIT,))
    for run, refused in ((jax.grad(fun), True), (fun.value_and_grad(), False)):
        out = SPLIT if refused else (P(), SPLIT)
        outer = jax.shard_map(run, mesh=mesh, in_specs=(P(), P("dp")), out_specs=out)
        if refused:
            message = (
                r"params\['block'\]\['v'\], float32\[16,8\].*, has its gradient as .*'dp'.* inside "
                r"shard_map it has its local shape. Use loss_fn.value_and_grad"
            )
            with pytest.raises(ValueError, match=f"^accumulate: {message}"):
                jax.jit(outer)(PARAMS, BATCH)
        else:
            helpers.assert_close(layouts.jit(outer)(PARAMS, BATCH), expected(), within=2e-5)


def test_in_an_outer_region_a_model_axis_that_is_not_manual_there():
    fun = decorate(mesh=None, in_specs=(MODEL,))
    outer = jax.shard_map(
        fun.value_and_grad(), mesh=mesh_of(dp=4, mp=2), in_specs=(P(), P("dp")), out_specs=P(),
        axis_names={"dp"}, check_vma=False,
    )  # fmt: skip
    message = (
        r"in_specs of params\['block'\]\['v'\], shape \(16, 8\), is .*'mp'.*: not manual in the "
        r"outer shard_map; .*\['w'\].*\. Make mp manual there"
    )
    with pytest.raises(ValueError, match=f"^accumulate: {message}"):
        jax.jit(outer)(PARAMS, BATCH)


def test_in_an_outer_region_jax_grad_refuses_gradients_in_another_order():
    mesh = layouts.mesh_of({"a": 2, "b": 2})
    fun = gradaccum.accumulate(
        lambda w, x: jnp.mean((x @ w) ** 2),
        microbatches=2,
        axis_name=("a", "b"),
        in_specs=(P(("a", "b")),),
        grad_specs=(P(("b", "a")),),
    )
    specs = {"in_specs": (P(("a", "b")), P(("a", "b"))), "out_specs": P(("b", "a"))}
    outer = jax.shard_map(jax.grad(fun), mesh=mesh, check_vma=False, **specs)
    with pytest.raises(ValueError, match=r"has its gradient as .*'b', 'a'.*value_and_grad"):
        jax.eval_shape(outer, jnp.ones((8, 4)), jnp.ones((16, 8)))


def test_the_message_names_the_spec_that_is_wrong():
    """The parameter's, where its gradient lies well."""
    mesh = layouts.mesh_of({"dp": 2, "mp": 2}, AxisType.Explicit)
    fun = gradaccum.accumulate(
        lambda w, x: jnp.mean((x @ w) ** 2),
        microbatches=2,
        axis_name="dp",
        in_specs=(P("dp"),),
        grad_specs=(P(None, "dp"),),
    )
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("mp")))
        with pytest.raises(ValueError, match=r"^accumulate: in_specs of w, .*axis 0 is split"):
            fun.value_and_grad()(w, jnp.ones((16, 8)))
