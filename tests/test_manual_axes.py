"""Raw collectives of a loss over a manual model axis: refused or right, never scaled."""

import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from manual_model import (
    BATCH,
    PARAMS,
    SPECS,
    H,
    M,
    decorate,
    expected,
    f,
    g,
    loss_fn,
    mesh,
    named,
    parallel,
)
from optax.microbatching import AccumulationType as Kind

from gradaccum.tensor_parallel import gather_from

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
