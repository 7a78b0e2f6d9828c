"""in_specs and grad_specs that are refused at the call, with numbers."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from specs_model import MODEL, PARAMS, SPLIT, B, decorate, mesh_of

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
