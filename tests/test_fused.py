"""Fused accumulation: where it is in place, its gradients with other options, random programs."""

import helpers
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fused_programs import (
    JVP_RULES,
    LAYERS,
    TWICE,
    B,
    D,
    K,
    L,
    assert_equal_gradients,
    deep_stack,
    in_place,
    jitted,
    layer,
    loss_of,
    make_batch,
    make_params,
    pair,
    per_layer,
    plain,
    stack,
)
from hypothesis import strategies as st
from jax import lax

import gradaccum

# --- Where it is taken ---------------------------------------------------------------------------


def two_stacks(p, x):
    return per_layer(lambda h, w, v, b: jnp.tanh(h @ w + b[None]) @ v, ("w", "v", "vec"))(p, x)


def dict_of_stacks(p, x):
    tree = {"attention": {"w": p["w"]}, "mlp": [p["v"], {"bias": p["vec"]}]}

    def body(h, t):
        return jnp.tanh(h @ t["attention"]["w"]) @ t["mlp"][0] + t["mlp"][1]["bias"][None], None

    return lax.scan(jax.checkpoint(body), x, tree)[0]


def cast_inside(p, x):
    body = lambda h, w: jnp.tanh(h.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16))  # noqa: E731
    return per_layer(lambda h, w: body(h, w).astype(jnp.float32))(p, x)


PLAIN = {
    "stack": (lambda p, x: stack(x, p["w"]), 1),
    "reverse": (lambda p, x: stack(x, p["w"], reverse=True), 1),
    "unroll": (lambda p, x: stack(x, p["w"], unroll=2), 1),
    "unrolled_whole": (lambda p, x: stack(x, p["w"], unroll=True), 1),
    "checkpoint_in_scan": (per_layer(jax.checkpoint(layer)), 1),
    "jit_in_scan": (per_layer(jax.jit(layer)), 1),
    "scan_in_jit": (lambda p, x: jax.jit(stack)(x, p["w"]), 1),
    "scan_in_jit_in_jit": (lambda p, x: jax.jit(lambda q, x: jax.jit(stack)(x, q))(p["w"], x), 1),
    "three_stacks": (two_stacks, 3),
    "tree_of_stacks": (dict_of_stacks, 3),
    "stack_of_stacks": (deep_stack, 1),
    "two_scans": (lambda p, x: stack(stack(x, p["w"]), p["v"]), 2),
    "one_plain_one_tied": (lambda p, x: stack(stack(x, p["w"]), p["v"]) @ p["v"][0], 1),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_stack_is_accumulated_in_place(name):
    program, leaves = PLAIN[name]
    assert_equal_gradients(program)
    assert in_place(program) == leaves
    assert in_place(program, fused=False) == 0


def test_a_cast_inside_the_layer_keeps_it_in_place():
    assert_equal_gradients(cast_inside, tolerance="bfloat16")
    assert in_place(cast_inside) == 1


def test_bfloat16_parameters():
    """Their accumulator is float32: a stand-in's; not of those that are cast before the scan."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params())
    outside = lambda p, x: stack(x, p["w"].astype(jnp.float32))  # noqa: E731
    for program, leaves in ((cast_inside, 1), (outside, 0)):
        assert_equal_gradients(program, params, tolerance="bfloat16")
        assert in_place(program, params) == leaves


def test_a_cast_of_the_stack_before_its_scan():
    program = lambda p, x: stack(x.astype(jnp.bfloat16), p["w"].astype(jnp.bfloat16))  # noqa: E731
    assert_equal_gradients(lambda p, x: program(p, x).astype(jnp.float32), tolerance="bfloat16")


def test_an_accumulator_as_narrow_as_the_parameter_is_in_place():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params())
    program = lambda p, x: stack(x.astype(jnp.bfloat16), p["w"]).astype(jnp.float32)  # noqa: E731
    assert_equal_gradients(program, params, tolerance="bfloat16", accumulator_dtype=jnp.bfloat16)
    assert in_place(program, params, accumulator_dtype=jnp.bfloat16) == 1


def test_a_complex_stack():
    params = {"w": make_params()["w"] * (1 + 0.5j)}
    program = lambda p, x: jnp.abs(per_layer(lambda h, w: h @ w)(p, x + 0j))  # noqa: E731
    assert_equal_gradients(program, params, tolerance="complex64")
    assert in_place(program, params) == 1


def test_temporary_memory_of_a_plain_stack_is_smaller_in_place():
    """By value a microbatch's gradient tree exists beside the accumulator; in place it does not."""
    width = 64
    params = jnp.zeros((8, width, width))
    batch = {"x": jnp.zeros((B, width)), "mask": jnp.ones(B)}
    program = lambda p, x: stack(x, p)  # noqa: E731

    def temporaries(fused):
        loss_fn = gradaccum.accumulate(
            loss_of(program), microbatches=K, axis_name=None, fused=fused
        )
        compiled = jax.jit(jax.grad(loss_fn)).lower(params, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(True) <= temporaries(False) - 0.1 * params.nbytes


# --- Together with the other options -------------------------------------------------------------

SOME = {
    "stack": lambda p, x: stack(x, p["w"]),
    "stack_of_stacks": deep_stack,
    "tied_jit": lambda p, x: pair(x, p["w"], p["w"]),
    "layer_jit_twice": per_layer(lambda h, w: jnp.tanh(h @ jitted(w, w))),
    "layer_checkpoint": per_layer(jax.checkpoint(lambda h, w: jnp.tanh(h @ jitted(w, w)))),
    "layer_indexed": per_layer(LAYERS["indexed"]),
    "layer_cond": per_layer(LAYERS["cond_closed_over"]),
    "tangent_twice": per_layer(lambda h, w: jnp.tanh(h @ JVP_RULES["jit_twice"](w))),
    "one_plain_one_tied": PLAIN["one_plain_one_tied"][0],
}
OPTIONS = {
    "weighted": {"weighted": True},
    "overlap": {"overlap": True},
    "weighted_overlap_unroll": {"weighted": True, "overlap": True, "unroll": 2},
    "on_eight_devices": {"mesh": 8, "microbatches": 1},
    "on_four_weighted": {"mesh": 4, "microbatches": 2, "weighted": True},
}
SOME_WITH_OPTIONS = [
    # Each program with two of the sets of options, each set with three programs or more.
    (name, list(OPTIONS)[(i + start) % len(OPTIONS)])
    for start in (0, 2)
    for i, name in enumerate(SOME)
]


@pytest.mark.parametrize(("name", "options"), SOME_WITH_OPTIONS)
def test_options(name, options):
    options = dict(OPTIONS[options])
    if "mesh" in options:
        options["mesh"] = helpers.data_mesh(options["mesh"])
    assert_equal_gradients(SOME[name], **options)


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"loss_reduction": "sum"}], ids=str)
@pytest.mark.parametrize("narrow", ["bfloat16_loss", "float16_leaf"])
def test_scale_where_the_cotangent_cannot_hold_it(narrow, options):
    """A narrow loss cannot be seeded with the factor 1/(k n), which is due all the same."""

    def loss_fn(p, batch):
        h = stack(batch["x"], p["w"]) * p["scale"][None]
        loss = jnp.mean(h**2) if "loss_reduction" not in options else jnp.sum(h**2)
        return loss.astype(jnp.bfloat16 if narrow == "bfloat16_loss" else jnp.float32)

    params = {"w": make_params()["w"], "scale": jnp.full(D, 1.5, jnp.float32)}
    if narrow == "float16_leaf":
        params["scale"] = params["scale"].astype(jnp.float16)
    fun = gradaccum.accumulate(loss_fn, microbatches=K, axis_name=None, **options)
    got, want = (jax.jit(jax.grad(f))(params, make_batch()) for f in (fun, loss_fn))
    helpers.assert_close(got["w"], want["w"])
    helpers.assert_close(got["scale"], want["scale"])


# --- Random programs -----------------------------------------------------------------------------

OPERATIONS = {
    "plain": plain,
    "sliced": lambda a, b: jnp.concatenate([a[:2], b[2:]]),
    "indexed": lambda a, b: a * b[0][None],
} | {n: TWICE[n] for n in ("jit", "checkpoint", "custom_vjp", "scan_xs_and_constant", "cond")}
WRAPPERS = {"none": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}
STACKS = ("w", "v", "u")

stages = st.fixed_dictionaries(
    {
        "xs": st.lists(st.sampled_from(STACKS), min_size=1, max_size=2),
        "constant": st.sampled_from([None, None, *STACKS]),
        "operations": st.lists(
            st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 2), st.integers(0, 2)),
            min_size=1,
            max_size=2,
        ),
        "inside": st.sampled_from(sorted(WRAPPERS)),
        "outside": st.sampled_from(sorted(WRAPPERS)),
        "reverse": st.booleans(),
    }
)


def _stage(h, p, stage):
    def scan_stage(h, xs, constant):
        def body(h, slices):
            slices = [*slices, *([] if constant is None else [constant[1]])]
            for name, i, j in stage["operations"]:
                a, b = slices[i % len(slices)], slices[j % len(slices)]
                h = jnp.tanh(h @ OPERATIONS[name](a, b))
            return h

        body = WRAPPERS[stage["inside"]](body)
        return lax.scan(lambda h, s: (body(h, s), None), h, xs, reverse=stage["reverse"])[0]

    constant = None if stage["constant"] is None else p[stage["constant"]]
    return WRAPPERS[stage["outside"]](scan_stage)(h, [p[n] for n in stage["xs"]], constant)


@hypothesis.settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[hypothesis.Phase.generate],  # each step of shrinking a failure compiles a program
)
@hypothesis.given(
    program=st.lists(stages, min_size=1, max_size=2),
    wrapper=st.sampled_from(sorted(WRAPPERS)),
    regularised=st.booleans(),
    weighted=st.booleans(),
)
def test_random_programs(program, wrapper, regularised, weighted):
    def run(p, x):
        for stage in program:
            x = _stage(x, p, stage)
        return x + 0.1 * jnp.sum(p["u"] ** 2) if regularised else x

    rng = np.random.default_rng(3)
    params = {n: jnp.asarray(rng.normal(size=(L, D, D)) / 2, jnp.float32) for n in STACKS}
    # A product of several layers' small numbers may vanish.
    assert_equal_gradients(WRAPPERS[wrapper](run), params, weighted=weighted, may_vanish=True)
