"""The state of `MultiSteps`, where it lies and its donation; what is refused; `all_reduce_mean`."""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from helpers import assert_close
from jax.sharding import PartitionSpec as P
from test_multisteps import (
    BYTES,
    FSDP,
    MOMENTUM,
    SHAPES,
    SPLIT,
    WAYS,
    WHOLE,
    in_full_batches,
    jit,
    make,
    place,
    program,
)
from test_multisteps_skips import MESH, ON, SGD

import gradaccum
from gradaccum import MultiSteps, Unreduced, audit


@pytest.mark.parametrize("name", ["mesh", "mp", "fsdp", "mp explicit set_mesh", "explicit"])
def test_accumulators_lie_as_their_parameters(name):
    """Eagerly, under jit, and in the types of `eval_shape`."""
    way = WAYS[name]
    specs = {"whole": WHOLE, "split": SPLIT, "fsdp": FSDP}[way.specs]
    rows = {n: P("dp", *(a if a != "dp" else None for a in s)) for n, s in specs.items()}
    params = place(make(1)[0], way.mesh, specs)
    with jax.set_mesh(way.mesh) if way.context else warnings.catch_warnings():
        tx = way.tx(optax.adamw(0.1), 4)
        states = tx.init(params), jax.jit(tx.init)(params)
        shapes = jax.eval_shape(tx.init, params)
        report = audit.collectives(jax.jit(tx.init), params, mesh=way.mesh)
    assert [row for row in report if "dp" in row.axes] == []
    n = way.mesh.shape["dp"]
    for state in states:
        layouts.assert_lies(state.acc_grads, way.mesh, rows)
        for weight in jax.tree.leaves(state.weight):
            layouts.assert_lies(weight, way.mesh, P("dp"))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == jax.tree.map(
            lambda x: (x.shape, x.dtype), shapes
        )
        for leaf in jax.tree.leaves(state):
            np.testing.assert_array_equal(leaf, np.zeros(leaf.shape))
        assert {n: x.shape for n, x in state.acc_grads.items()} == {
            name: (n, *shape) for name, shape in SHAPES.items()
        }
    layouts.assert_lies(states[0].inner_opt_state[0].mu, way.mesh, specs)


def buffers(*trees):
    return [
        s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(trees) for s in x.addressable_shards
    ]


KEEPS_PARAMS = optax.GradientTransformation(lambda p: (p, p), lambda u, s, p: (u, s))
INNER = {
    "adamw": optax.adamw(1e-2),
    "schedule_free": optax.contrib.schedule_free_sgd(0.1),
    "keeps parameters": KEEPS_PARAMS,
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("placed", [True, False], ids=["placed", "anywhere"])
@pytest.mark.parametrize("way", ["plain", "mesh"])
def test_b21_no_two_arrays_share_a_buffer(way, placed, inner):
    """So that state and parameters can be donated together."""
    way = WAYS[way]
    params = jax.tree.map(jnp.asarray, make(1)[0])
    params = place(params, way.mesh, WHOLE) if placed else params
    state = way.tx(INNER[inner], 2).init(params)
    found = buffers(params, state)
    assert len(found) == len(set(found))  # donating one twice ends the process


@pytest.mark.parametrize("inner", ["adamw", "schedule_free"])
@pytest.mark.parametrize("way", ["plain", "mesh"])
def test_b20_state_and_parameters_are_donated(way, inner):
    way = WAYS[way]
    step, (params, state, rows) = program(way, way.tx(INNER[inner], 2))
    donating = jax.jit(step, donate_argnums=(0, 1))
    size = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((params, state)))
    analysis = donating.lower(params, state, rows).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= size - 8  # a flag or two is made anew
    want = jax.device_get(jit(step)(*jit(step)(params, state, rows), rows))
    for _ in range(2):
        old, (params, state) = (params, state), donating(params, state, rows)
        assert all(x.is_deleted() for x in jax.tree.leaves(old) if x.ndim)
    assert_close((params, state.inner_opt_state), (want[0], want[1].inner_opt_state), within=1e-5)


@pytest.mark.parametrize("way", ["plain", "mesh"])
def test_a_call_that_waits_copies_nothing(way):
    """The state donated, and returned in the arguments' order."""
    way = WAYS[way]
    step, (params, state, rows) = program(way, way.tx(optax.adamw(1e-2), 2))
    text = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, rows).compile().as_text()
    waits = re.search(r"branch_computations=\{%([\w.]+), ", text)[1]
    body = re.search(rf"\n%{re.escape(waits)} \(.*?\n}}", text, re.S)[0]
    assert "all-reduce" not in body
    copied = [c for c in re.findall(r"= f32\[([\d,]*)\]\S* copy\(", body) if c not in ("", "1,3")]
    assert copied == []
    assert re.findall(r"f32\[\d.*copy\(", text[text.index("\nENTRY") :]) == []


# --- Errors --------------------------------------------------------------------------------------

PARAMS = {"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}


def rows(n=8, a=3, axis="dp"):
    ones = lambda *s: jnp.ones(s)  # noqa: E731
    return {"a": Unreduced(ones(n, a), ones(n), axis), "b": Unreduced(ones(n, 2), ones(n), axis)}


def cast(tree):
    return jax.tree.map(lambda x: dataclasses.replace(x, weight=x.weight.astype(jnp.bfloat16)),
                        tree, is_leaf=lambda x: isinstance(x, Unreduced))  # fmt: skip


REFUSED = {
    # what -> options, gradients, error, message
    "rows without an axis": (
        {}, rows, TypeError,
        "MultiSteps: ['a'], ['b']: an Unreduced value, but axis_name was not given. Give the",
    ),
    "plain with an axis": (
        ON, lambda: PARAMS, TypeError,
        "MultiSteps: ['a'], ['b']: a plain gradient, but axis_name was given and 'dp' is not man",
    ),
    "mixed": (
        ON, lambda: rows() | {"b": PARAMS["b"]}, TypeError,
        "MultiSteps: ['b'] is an array float32[2]; every leaf must be a gradaccum.Unreduced",
    ),
    "touched": (
        ON, lambda: cast(rows()), TypeError,
        "MultiSteps: ['a'], ['b']: the parts of this gradaccum.Unreduced do not belong together",
    ),
    "structure": (
        ON, lambda: {"a": rows()["a"]}, ValueError,
        "MultiSteps: the gradients have the structure PyTreeDef({'a': *}), the parameters given to",
    ),
    "plain structure": (
        {}, lambda: [*PARAMS.values()], ValueError,
        "MultiSteps: the gradients have the structure PyTreeDef([*, *]), the parameters given to",
    ),
    "shape": (
        ON, lambda: rows(a=4), ValueError,
        "['a'] has (8, 4), its accumulator (8, 3). Give gradients of the parameters given to init; "
        "for another number of devices move the state with resize(state, mesh).",
    ),
    "plain shape": (
        {}, lambda: PARAMS | {"b": np.float32(1)}, ValueError, "['b'] has (), its accumulator (2,)",
    ),
    "number of rows": (
        ON, lambda: rows(4), ValueError,
        "MultiSteps: an Unreduced of 4 rows; the data axes (dp=8) need 8. Take the mean",
    ),
    "other axes": (
        ON, lambda: rows(axis="x"), ValueError,
        "MultiSteps: values of different data axes: axis_name over 'dp', ['a'] over 'x', ['b']",
    ),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("name", REFUSED)
def test_gradients_that_are_refused(name, compiled):
    options, grads, error, message = REFUSED[name]
    tx = MultiSteps(SGD, 2, **options)
    state = tx.init(PARAMS)
    with pytest.raises(error, match=re.escape(message)):
        (jax.jit(tx.update) if compiled else tx.update)(grads(), state, PARAMS)


@pytest.mark.parametrize("early", [optax.clip_by_global_norm(1.0), optax.scale(0.5),
                                   optax.zero_nans(), optax.clip(1.0)], ids=range(4))  # fmt: skip
def test_a_transformation_before_it_cannot_compute_with_rows(early):
    tx = optax.chain(early, MultiSteps(SGD, 2, **ON))
    state = tx.init(PARAMS)
    with pytest.raises(TypeError, match="float0"):
        jax.jit(tx.update)(rows(), state, PARAMS)


def test_a_gradient_that_jax_has_summed_is_refused():
    """Under check_vma=True parameters that do not vary have such gradients."""
    tx = MultiSteps(SGD, 2, **ON)
    state = tx.init(PARAMS)
    specs = jax.tree.map(lambda x: x.sharding.spec, state)

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean(x) * (p["a"].sum() + p["b"].sum()))(params)
        return tx.update(grads, state, params)

    step = jax.shard_map(step, mesh=MESH, in_specs=(P(), specs, P("dp")), out_specs=(P(), specs))
    match = r"\['a'\], \['b'\]: not this device's gradient: .* summed it over 'dp' already.*pcast"
    with pytest.raises(TypeError, match=match):
        jax.jit(step)(PARAMS, state, np.ones(8, np.float32))


def test_two_losses_in_one_tree_keep_their_weights():
    tx = MultiSteps(SGD, 2, **ON)
    grads = rows() | {"b": Unreduced(jnp.ones((8, 2)), jnp.full(8, 4.0), "dp")}
    state = tx.init(PARAMS)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(grads, state, PARAMS)
    assert {n: x.tolist() for n, x in updates.items()} == {"a": [-1.0] * 3, "b": [-0.25] * 2}


OPTIONS = {
    "unknown axis": (
        {"axis_name": "x", "mesh": MESH}, ValueError,
        "MultiSteps: axis_name has 'x', but the mesh's axes are (dp=8). Name the axes",
    ),
    "no mesh": ({"axis_name": "dp"}, ValueError, "MultiSteps: no mesh, and 8 devices. Give mesh="),
    "axis": ({"axis_name": 3}, ValueError, "MultiSteps: axis_name is 3; it must be a mesh axis's"),
    "mesh": ({"axis_name": "dp", "mesh": 8}, TypeError, "MultiSteps: mesh is 8; it must be a"),
    "dtype": (
        {"accumulator_dtype": "int32"}, TypeError,
        "MultiSteps: accumulator_dtype is 'int32'; it must be a floating dtype.",
    ),
    "skip array": (
        {"should_skip_update_fn": lambda *_: (jnp.ones(2, bool), ())}, ValueError,
        "MultiSteps: should_skip_update_fn returned bool[2]; it must return a boolean scalar array",
    ),
    "skip number": (
        {"should_skip_update_fn": lambda *_: (1.0, ())}, ValueError,
        "MultiSteps: should_skip_update_fn returned float32[]; it must return a boolean scalar",
    ),
    "skip alone": (
        {"should_skip_update_fn": lambda *_: jnp.ones((), bool)}, ValueError,
        "MultiSteps: should_skip_update_fn returned an array bool[]; it must return a pair",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_are_refused(name):
    options, error, message = OPTIONS[name]
    with pytest.raises(error, match=re.escape(message)):
        MultiSteps(SGD, 2, **options).init(PARAMS)


# --- The chain element ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in WAYS if n not in ("plain", "fsdp")])
def test_all_reduce_mean_is_a_step_a_call(name):
    """Weighted, where there are rows; one reduction, in no branch."""
    way = WAYS[name]
    reduction = "tokens" if "rows" in way.grads else "mean"
    params, batch = make(2)
    tx = optax.chain(gradaccum.all_reduce_mean(**way.on), MOMENTUM)
    with jax.set_mesh(way.mesh) if way.context else warnings.catch_warnings():
        got = place(params, way.mesh, SPLIT if way.specs == "split" else WHOLE)
        state = tx.init(got)
        step = jit(way.step(tx, reduction, state))
        for i in range(2):
            rows = {n: x[i] for n, x in batch.items()}
            args = got, state, place(rows, way.mesh, jax.tree.map(lambda _: P("dp"), rows))
            got, state = step(*args)
        audit.assert_one_reduction(step, *args, axis_name="dp", mesh=way.mesh)
        crossed = audit.collectives(step, *args, mesh=way.mesh).totals["dp"].bytes
    assert_close(got, in_full_batches(MOMENTUM, params, batch, [1, 1], reduction))
    assert crossed == (BYTES - 12) / (2 if way.specs == "split" else 1) + 4  # one weight for all


def test_all_reduce_mean_refuses():
    update = gradaccum.all_reduce_mean(**ON).update
    for grads, error, message in (
        (PARAMS, TypeError, "all_reduce_mean: ['a'], ['b']: a plain gradient, but axis_name was"),
        (
            cast(rows()),
            TypeError,
            "all_reduce_mean: ['a'], ['b']: the parts of this",
        ),
        (rows(axis="x"), ValueError, "all_reduce_mean: values of different data axes: axis_name o"),
        (rows(4), ValueError, "all_reduce_mean: an Unreduced of 4 rows; the data axes (dp=8) need"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            update(grads, optax.EmptyState())
    with pytest.raises(ValueError, match="all_reduce_mean: axis_name is None; name the data axis"):
        gradaccum.all_reduce_mean(None)
