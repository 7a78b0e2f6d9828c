"""What of the decorated loss's derivatives is not computed, and what cannot be."""

import helpers
import jax
import jax.numpy as jnp
import pytest
from nonlinear_loss import BATCH, PARAMS, K, jit, loss_fn, on

import gradaccum


@pytest.mark.parametrize("where", ["alone", "mesh"])
@pytest.mark.parametrize("fused", [True, False])
def test_an_undifferentiated_call_does_no_gradient_work(fused, where):
    """Its products are those of the loss: a scan of layers with one, and no ref."""
    fun = on(where, fused=fused)
    count = helpers.count_primitive
    assert count(fun, "dot_general", PARAMS, BATCH) == count(loss_fn, "dot_general", PARAMS, BATCH)
    assert count(fun, "transpose", PARAMS, BATCH) == count(fun, "new_ref", PARAMS, BATCH) == 0
    assert count(jax.grad(fun), "dot_general", PARAMS, BATCH) > 1


def test_only_what_is_differentiated_is_accumulated():
    """The gradient of the output's scale alone needs no product with the layers' transposes."""
    fun = on("alone", fused=True)
    of_out = lambda out: fun(PARAMS | {"out": out}, BATCH)  # noqa: E731
    assert helpers.count_in_place(jax.grad(of_out), PARAMS["out"]) == 0
    assert helpers.count_primitive(jax.grad(of_out), "dot_general", PARAMS["out"]) == 1
    want = jax.grad(lambda out: loss_fn(PARAMS | {"out": out}, BATCH))(PARAMS["out"])
    helpers.assert_close(jit(jax.grad(of_out))(PARAMS["out"]), want)


@pytest.mark.parametrize("fused", [True, False])
def test_differentiating_a_closed_over_value_raises(fused):
    def outer(out):
        inner = lambda layers, batch: loss_fn({"layers": layers, "out": out}, batch)  # noqa: E731
        fun = gradaccum.accumulate(inner, microbatches=K, axis_name=None, fused=fused)
        return fun(PARAMS["layers"], BATCH)

    with pytest.raises(jax.errors.UnexpectedTracerError):
        jax.grad(outer)(PARAMS["out"])


def with_aux(params, batch):
    loss = loss_fn(params, batch)
    return loss, {"double": 2 * loss}


@pytest.mark.parametrize(
    "under", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "checkpoint"]
)
@pytest.mark.parametrize("where", ["alone", "mesh"])
def test_differentiating_through_aux_raises(where, under):
    options = {"axis_name": None} if where == "alone" else {"mesh": helpers.data_mesh(8)}
    fun = gradaccum.accumulate(with_aux, microbatches=K, has_aux=True, **options)

    def uses_aux(params):
        loss, aux = under(fun)(params, BATCH)
        return loss + aux["double"]

    with pytest.raises(TypeError, match=r"accumulate: the auxiliary output was differentiated.*"
                       r"part of the loss, or jax\.lax\.stop_gradient"):  # fmt: skip
        jax.grad(uses_aux)(PARAMS)


def test_aux_that_is_not_differentiated_is_free_to_be_used():
    """Through jit, checkpoint, scan and stop_gradient its cotangent stays symbolic."""
    fun = gradaccum.accumulate(with_aux, microbatches=K, has_aux=True, axis_name=None, fused=False)

    def uses_aux(params):
        loss, aux = jax.jit(jax.checkpoint(fun))(params, BATCH)
        body = lambda c, _: (c + fun(params, BATCH)[0], fun(params, BATCH)[1])  # noqa: E731
        more, logged = jax.lax.scan(body, 0.0, length=2)
        return loss + more + jax.lax.stop_gradient(aux["double"]), (aux, logged)

    (value, (aux, logged)), grads = jit(jax.value_and_grad(uses_aux, has_aux=True))(PARAMS)
    loss, want = jax.value_and_grad(loss_fn)(PARAMS, BATCH)
    helpers.assert_close(value, 5 * loss)
    helpers.assert_close(aux["double"], 2 * loss)
    helpers.assert_close(logged["double"], jnp.full(2, 2 * loss))
    helpers.assert_close(grads, jax.tree.map(lambda g: 3 * g, want))
