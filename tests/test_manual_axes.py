"""What a loss may do with a manual model axis: raw collectives refused or right, never scaled."""

import functools

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from optax.microbatching import AccumulationType as Kind

import gradaccum
from gradaccum.tensor_parallel import copy_to, gather_from, reduce_from

B, D, H, M = 16, 4, 8, 2
SPECS = {"w": P(None, "mp"), "v": P("mp"), "b": P()}
PARAMS = {"w": helpers.normal(0, D, H), "v": helpers.normal(1, H, D), "b": helpers.normal(2, D)}
PARAMS = jax.tree.map(lambda x: x.astype(np.float32) / 2, PARAMS)
BATCH = {n: helpers.normal(i, B, D).astype(np.float32) for i, n in enumerate("xy", 7)}

f, g = (functools.partial(o, axis_name="mp") for o in (copy_to, reduce_from))


def loss_fn(p, batch, f=lambda x: x, g=lambda x: x):
    y = g(jnp.tanh(f(batch["x"]) @ p["w"]) @ p["v"]) + p["b"][None]
    return jnp.mean(jnp.sin(y) * batch["y"])


def parallel(p, batch):
    return loss_fn(p, batch, f, g)


@functools.cache
def mesh():
    return layouts.mesh_of({"dp": 2, "mp": M})


def decorate(fun, **options):
    given = {"microbatches": 2, "axis_name": "dp", "mesh": mesh(), "in_specs": (SPECS,)}
    return gradaccum.accumulate(fun, **given | options)


@functools.cache
def expected():
    return layouts.in_float64(jax.value_and_grad(loss_fn), PARAMS, BATCH)


# --- Refused -------------------------------------------------------------------------------------


def raw_psum(p, batch):
    return loss_fn(p, batch, f, lambda x: lax.psum(x, "mp"))


def raw_pmean(p, batch):
    return lax.pmean(parallel(p, batch), "mp")


def raw_gather(p, batch):
    h = lax.all_gather(jnp.tanh(f(batch["x"]) @ p["w"]), "mp", axis=1, tiled=True)
    return jnp.mean(h) + parallel(p, batch)


def of_two_axes(p, batch):
    return lax.pmean(parallel(p, batch), ("dp", "mp"))


def in_a_loop(p, batch):
    step = lambda i, h: lax.psum(h * p["b"][None], "mp")  # noqa: E731
    return parallel(p, batch) + jnp.mean(lax.fori_loop(0, 2, step, batch["x"]))


def in_a_branch(p, batch):
    other = lambda: lax.psum(jnp.sum(p["w"]), "mp")  # noqa: E731
    return parallel(p, batch) + lax.cond(batch["x"][0, 0] > 0, other, lambda: 0.0)


def recomputed(p, batch):
    return jax.checkpoint(raw_psum)(p, batch)


def vmapped(p, batch):
    return parallel(p, batch) + jnp.sum(jax.vmap(lambda w: lax.psum(jnp.sum(w), "mp"))(p["w"]))


REFUSED = {
    raw_psum: "psum over mp",
    raw_pmean: "psum over mp",
    raw_gather: "all_gather over mp",
    of_two_axes: "psum over dp, mp",
    in_a_loop: "psum over mp",
    in_a_branch: "psum over mp",
    recomputed: "psum over mp",
    vmapped: "psum over mp",
}
named = functools.partial(pytest.mark.parametrize, ids=lambda x: getattr(x, "__name__", str(x)))


@named("how", ["grad", "method"])
@named("fun", REFUSED)
def test_v4_refused_where_it_is_differentiated(fun, how):
    """The message names the collective, its place in the loss, and the operators."""
    loss = decorate(fun)
    run = {"grad": jax.grad(loss), "method": loss.value_and_grad()}[how]
    message = (
        "the loss is differentiated through a raw collective over a manual model axis "
        rf"\({REFUSED[fun]} at .*test_manual_axes.py:\d+.*\); with check_vma=False its gradient "
        r"would be too large by the axis's size. Use gradaccum.tensor_parallel.reduce_from instead "
        r"of psum \(divide by the axis's size for pmean\), .*copy_to\(reduce_from\(x\)\).*"
        r"gather_from instead of all_gather; and copy_to where.*check_vma=True"
    )
    with pytest.raises(ValueError, match=f"^accumulate: {message}"):
        run(PARAMS, BATCH)


def test_refused_of_another_gradient_too():
    """Where only one of the parameters is differentiated, and it goes through the psum."""
    loss = decorate(lambda b, batch, p: raw_psum(p | {"b": b}, batch), in_specs=(None, None, SPECS))
    others = {"w": PARAMS["w"], "v": PARAMS["v"], "b": PARAMS["b"]}
    jax.grad(loss)(PARAMS["b"], BATCH, others)  # the bias is added after it
    with pytest.raises(ValueError, match=r"^accumulate: the loss is differentiated through a raw"):
        jax.grad(loss, argnums=2)(PARAMS["b"], BATCH, others)


def test_v4_refused_inside_an_outer_region_too():
    loss = decorate(raw_psum, mesh=None, in_specs=None)
    outer = jax.shard_map(
        jax.grad(loss), mesh=mesh(), in_specs=(SPECS, P("dp")), out_specs=SPECS, check_vma=False
    )
    with pytest.raises(ValueError, match=r"^accumulate: .* \(psum over mp at .*test_manual_axes"):
        jax.jit(outer)(PARAMS, BATCH)


@named("fun", [fun for fun in REFUSED if fun is not of_two_axes])
def test_undifferentiated_it_is_not_refused(fun):
    """Without a gradient there is none to be wrong."""
    got = layouts.jit(decorate(fun))(PARAMS, BATCH)
    want = layouts.jit(
        jax.shard_map(fun, mesh=mesh(), in_specs=(SPECS, P()), out_specs=P(), check_vma=False)
    )(PARAMS, BATCH)
    if fun is in_a_branch:  # decided by each microbatch's own first entry
        assert np.isfinite(got)
    else:
        helpers.assert_close(got, jax.device_get(want), within=2e-5)


# --- Not refused, and right ----------------------------------------------------------------------


def count(p, batch):
    """A count of devices, and a value behind stop_gradient."""
    ones = lax.psum(jnp.ones(()), "mp") / M
    size = lax.stop_gradient(lax.psum(jnp.sum(p["w"] ** 2), "mp"))
    return parallel(p, batch) * ones + 0 * size


def shift(p, batch):
    """A maximum before a softmax: flat, behind stop_gradient inside pmax."""
    h = jnp.tanh(f(batch["x"]) @ p["w"])
    top = lax.pmax(lax.stop_gradient(jnp.max(h)), "mp")
    return parallel(p, batch) + 0 * top


def own_rule(p, batch):
    @jax.custom_vjp
    def total(x):
        return lax.psum(x, "mp")

    total.defvjp(lambda x: (total(x), None), lambda _, ct: (ct,))
    return loss_fn(p, batch, f, total)


def integers(p, batch):
    most = lax.psum(jnp.argmax(batch["x"], axis=1), "mp")
    return parallel(p, batch) + 0 * jnp.sum(most)


def gathered(p, batch):
    """Columns gathered to be read alike, by the operator."""
    h = gather_from(jnp.tanh(f(batch["x"]) @ p["w"]), "mp", 1)
    v = gather_from(p["v"], "mp", 0)
    return jnp.mean(jnp.sin(h @ v + p["b"][None]) * batch["y"])


def permuted(p, batch):
    """Each device computes with the other's shards: ppermute transposes right."""
    swap = [(0, 1), (1, 0)]
    p = p | {n: lax.ppermute(p[n], "mp", swap) for n in ("w", "v")}
    return loss_fn(p, batch, f, g)


@named("fun", [parallel, count, shift, own_rule, integers, gathered, permuted])
def test_not_refused_and_right(fun):
    got = layouts.jit(jax.value_and_grad(decorate(fun)))(PARAMS, BATCH)
    helpers.assert_close(got, expected(), within=2e-5)


def test_of_aux_alone_it_is_not_refused():
    def with_aux(p, batch):
        norm = lax.psum(jnp.sum(p["w"] ** 2), "mp")
        return parallel(p, batch), {"norm": norm, "rows": lax.psum(batch["x"] @ p["w"], "mp")}

    kinds = {"norm": Kind.MEAN, "rows": Kind.CONCAT}
    fun = decorate(with_aux, has_aux=True, aux_accumulator=kinds)
    (loss, aux), grads = layouts.jit(jax.value_and_grad(fun, has_aux=True))(PARAMS, BATCH)
    helpers.assert_close((loss, grads), expected(), within=2e-5)
    w = PARAMS["w"].astype(np.float64)
    rows = BATCH["x"] @ (w[:, : H // 2] + w[:, H // 2 :])
    helpers.assert_close(aux, {"norm": np.sum(w**2), "rows": rows}, within=2e-5)


# --- check_vma=True ------------------------------------------------------------------------------

RAW = {
    raw_psum: lambda p, b: loss_fn(p, b),
    raw_pmean: lambda p, b: loss_fn(p, b),
    raw_gather: lambda p, b: jnp.mean(jnp.tanh(b["x"] @ p["w"])) + loss_fn(p, b),
    recomputed: lambda p, b: loss_fn(p, b),
    parallel: lambda p, b: loss_fn(p, b),
    gathered: lambda p, b: loss_fn(p, b),
}


@named("fun", RAW)
def test_v4_typed_raw_collectives_are_right(fun):
    def typed(p, batch):
        # all_gather leaves its result typed as varying: the mean over equal copies is one of them
        return lax.pmean(fun(p, batch), "mp") if fun is raw_gather else fun(p, batch)

    got = layouts.jit(jax.value_and_grad(decorate(typed, check_vma=True)))(PARAMS, BATCH)
    want = layouts.in_float64(jax.value_and_grad(RAW[fun]), PARAMS, BATCH)
    helpers.assert_close(got, want, within=2e-5)


def test_typed_replicated_values_need_no_copy_to():
    got = layouts.jit(jax.value_and_grad(decorate(no_copy, check_vma=True)))(PARAMS, BATCH)
    want = layouts.in_float64(
        jax.value_and_grad(lambda p, b: loss_fn(p, scaled(p, b))), PARAMS, BATCH
    )
    helpers.assert_close(got, want, within=2e-5)


# --- What is missing -----------------------------------------------------------------------------


def scaled(p, batch):
    """The input is computed from a replicated parameter."""
    return batch | {"x": batch["x"] * p["b"][None]}


def no_copy(p, batch):
    return loss_fn(p, scaled(p, batch), g=g)


@named("how", ["grad", "method"])
def test_a_replicated_value_without_copy_to_is_refused(how):
    """Each device would have a part of the bias's gradient."""
    loss = decorate(no_copy)
    run = {"grad": jax.grad(loss), "method": loss.value_and_grad()}[how]
    message = (
        "a value that is the same on all devices of mp is used where each has a part of its own "
        r"\(dot_general at .*test_manual_axes.py:\d+.*\), .*"
        r"gradaccum.tensor_parallel.copy_to\(x, 'mp'\) there, or give check_vma=True"
    )
    with pytest.raises(ValueError, match=f"^accumulate: {message}"):
        run(PARAMS, BATCH)
    with_copy = decorate(lambda p, batch: loss_fn(p, scaled(p, batch), f, g))
    got = layouts.jit(jax.value_and_grad(with_copy))(PARAMS, BATCH)
    want = layouts.in_float64(
        jax.value_and_grad(lambda p, b: loss_fn(p, scaled(p, b))), PARAMS, BATCH
    )
    helpers.assert_close(got, want, within=2e-5)


@pytest.mark.parametrize(
    ("fun", "message"),
    [
        (
            lambda p, batch: loss_fn(p, scaled(p, batch), lambda x: f(f(x)), g),
            "a value that has been through gradaccum.tensor_parallel.copy_to.*, or all_gather_to, "
            r"is used where all devices compute alike \(an operator at .*test_manual_axes.py:\d+",
        ),
        (
            lambda p, batch: f(parallel(p, batch)),
            r".* is used where all devices compute alike \(the loss itself at its end\)",
        ),
        (
            lambda p, batch: parallel({**p, "w": f(p["w"])}, batch),
            r".*, or scatter_to, is given a value of which each device of mp has its own \(an "
            r"operator at .*test_manual_axes.py:\d+.*Leave it out there",
        ),
    ],
    ids=["twice", "the loss", "a weight"],
)
def test_a_copy_to_too_many_is_refused(fun, message):
    """Gradients would be too large by the axis's size, or of other weights too."""
    with pytest.raises(ValueError, match=f"^accumulate: {message}"):
        jax.grad(decorate(fun))(PARAMS, BATCH)


@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
def test_operators_over_a_data_axis_are_refused(check_vma):
    """Each device's batch is its own: untyped, gradients would be those of one device's loss."""

    def loss(p, batch):
        return parallel(p, batch) + reduce_from(jnp.mean(batch["x"] * p["b"][None]), "dp")

    message = (
        r"gradaccum.tensor_parallel is used over the data axis dp \(at .*test_manual_axes.py:\d+"
        ".*Give them the model axis alone, named in in_specs and not in axis_name; a sum"
    )
    with pytest.raises(ValueError, match=f"^accumulate: {message}"):
        jax.grad(decorate(loss, check_vma=check_vma))(PARAMS, BATCH)


def no_sum(p, batch):
    return loss_fn(p, batch, f)


@named("how", ["grad", "method", "call"])
@pytest.mark.parametrize("aux", [False, True], ids=["loss", "aux"])
@pytest.mark.parametrize("check_vma", [False, True], ids=["untyped", "typed"])
def test_a_loss_that_varies_over_a_model_axis_is_refused(check_vma, aux, how):
    """Of the loss, or of aux: a part of a sum that is to be of all parts."""
    fun = (lambda p, b: (parallel(p, b), no_sum(p, b))) if aux else no_sum
    loss = decorate(fun, check_vma=check_vma, has_aux=aux)
    run = {"grad": jax.grad(loss, has_aux=aux), "method": loss.value_and_grad(), "call": loss}[how]
    message = (
        "in_specs names the model axis mp, so the loss sees one device's shard and the loss, or "
        "its aux, varies over it: .* Sum it with gradaccum.tensor_parallel.reduce_from "
        r"\(or, with check_vma=True, jax.lax.psum\)"
    )
    with pytest.raises(ValueError, match=f"^accumulate: {message}"):
        run(PARAMS, BATCH)


# --- Weights -------------------------------------------------------------------------------------


def test_a_weight_that_differs_over_a_model_axis_is_refused():
    """The devices of one microbatch would disagree on whether it runs, and hang."""
    specs = (SPECS, {"x": P("dp"), "y": P("dp"), "mask": P("dp", "mp")})
    batch = BATCH | {"mask": np.ones((B, 4), np.float32)}
    fun = lambda p, batch: parallel(p, {n: batch[n] for n in "xy"})  # noqa: E731
    loss = decorate(fun, in_specs=specs, weight_fn=lambda batch: batch["mask"].sum())
    with pytest.raises(ValueError, match=r"splits the batch over the model axis mp too.*psum\(wei"):
        jax.grad(loss)(PARAMS, batch)
    loss = decorate(
        fun, in_specs=specs, weight_fn=lambda batch: lax.psum(batch["mask"].sum(), "mp")
    )
    got = layouts.jit(jax.value_and_grad(loss))(PARAMS, batch)
    helpers.assert_close(got, expected(), within=2e-5)


@jax.custom_vjp
def own_matmul(x, w):
    """A kernel of the user's with its own rule, which does not communicate."""
    return x @ w


own_matmul.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda xw, ct: (ct @ xw[1].T, jnp.swapaxes(xw[0], 0, 1) @ ct)
)


@pytest.mark.parametrize("copied", [False, True], ids=["without copy_to", "with copy_to"])
def test_a_replicated_value_in_a_call_with_its_own_rule(copied):
    def loss(p, batch, f=lambda x: x, g=lambda x: x):
        y = g(jnp.tanh(own_matmul(f(scaled(p, batch)["x"]), p["w"])) @ p["v"])
        return jnp.mean(jnp.sin(y) * batch["y"])

    fun = decorate(functools.partial(loss, f=f if copied else lambda x: x, g=g))
    if not copied:
        with pytest.raises(ValueError, match=r"copy_to\(x, 'mp'\) there"):
            jax.grad(fun)(PARAMS, BATCH)
        return
    got = layouts.jit(jax.value_and_grad(fun))(PARAMS, BATCH)
    want = layouts.in_float64(jax.value_and_grad(loss), PARAMS, BATCH)
    helpers.assert_close(got, want, within=2e-5)


def test_two_model_axes_each_with_its_own_sum():
    """Tokens split over sp, weights over tp: a sum over sp of what is replicated over tp."""
    specs = {"w": P(None, "tp"), "v": P("tp"), "b": P()}

    def loss(p, batch):
        p = jax.tree.map(lambda x: copy_to(x, "sp"), p)
        x = copy_to(batch["x"] * p["b"][None, None], "tp")
        y = reduce_from(jnp.tanh(x @ p["w"]) @ p["v"], "tp")
        return reduce_from(jnp.mean(jnp.sin(y) * batch["y"]), "sp") / 2

    batch = {n: x.reshape(B // 2, 2, D) for n, x in BATCH.items()}
    fun = gradaccum.accumulate(
        loss,
        microbatches=2,
        axis_name="dp",
        mesh=layouts.mesh_of({"dp": 2, "sp": 2, "tp": 2}),
        in_specs=(specs, P("dp", "sp")),
    )
    got = layouts.jit(jax.value_and_grad(fun))(PARAMS, batch)
    want = layouts.in_float64(
        jax.value_and_grad(
            lambda p, b: jnp.mean(
                jnp.sin(jnp.tanh((b["x"] * p["b"][None]) @ p["w"]) @ p["v"]) * b["y"]
            )
        ),
        PARAMS,
        BATCH,
    )
    helpers.assert_close(got, want, within=2e-5)


# --- Inside an outer region, where shard_map has split the arrays already ------------------------


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        pytest.param(loss_fn, {}, "the loss, or its aux, varies over it", id="no sum"),
        pytest.param(no_copy, {}, "give the outer jax.shard_map check_vma=True", id="no copy"),
        pytest.param(
            lambda p, batch: g(jnp.mean(jnp.sum(f(p["b"])) * batch["x"])),
            {"weight_fn": lambda batch: jnp.sum(batch["x"] > 0), "batch": P("dp", "mp")},
            "return that of all parts, jax.lax.psum",
            id="weight of a part",
        ),
    ],
)
def test_inside_an_outer_shard_map_the_same_is_refused(loss, options, message):
    options = dict(options)
    batch = options.pop("batch", P("dp"))
    fun = gradaccum.accumulate(
        loss, microbatches=2, axis_name="dp", in_specs=(SPECS, batch), **options
    )
    outer = jax.shard_map(
        jax.grad(fun), mesh=mesh(), in_specs=(SPECS, batch), out_specs=SPECS, check_vma=False
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(outer, PARAMS, BATCH)
