"""What has been through an f too many, and an f of what each device has its own of."""

import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from variance_operators import f, g, gather_scatter, linear_f, none, swish, text_f, text_g
from variance_programs import (
    TWINS,
    of_params,
    once,
    residual,
    scanned,
    scatter_rows,
    scattered,
    two_layers,
)
from variance_verdicts import is_from_here, is_right, verdict

from gradaccum.tensor_parallel import copy_to, scatter_to


def x_positive(h):
    return h.sum() > 0


def once_more(h, w):
    return once(2 * h, w)


def after_f(f_before=f, f_inside=none, add=jnp.add):
    """A residual that is taken after the f, as it must not be."""

    def loss(p, x):
        h = f_before(x + p["bias"])
        return jnp.square(add(h, g(jnp.tanh(f_inside(h) @ p["up"]) @ p["down"]))).mean()

    return loss


# An f too many: as a pair, the program and what JAX's types accept of it, its gradients right.
EXTRA = {
    "f twice": (two_layers(f1=lambda v: f(f(v))), two_layers(), "custom_vjp_call"),
    "f twice, textbook": (
        two_layers(f1=lambda v: text_f(text_f(v)), f2=text_f, g=text_g),
        two_layers(),
        "custom_vjp_call",
    ),
    "f twice, linear_call": (
        of_params(lambda h, w: once(linear_f(linear_f(h)), w, none)),
        of_params(once),
        "linear_call",
    ),
    "f twice, of two axes": (
        residual(lambda v: copy_to(f(v), ("dp", "mp"))),
        residual(),
        "custom_vjp_call",
    ),
    "f, arithmetic, f": (
        of_params(lambda h, w: once(swish(2 * f(h)), w)),
        of_params(lambda h, w: once(swish(2 * h), w)),
        "custom_vjp_call",
    ),
    "f in a scan that f enters": (
        lambda p, x: scanned()({**p, "bias": f(p["bias"])}, x),
        scanned(),
        "custom_vjp_call",
    ),
    "f in a branch that f enters": (
        of_params(lambda h, w: lax.cond(x_positive(h), once, once_more, f(h), w)),
        of_params(lambda h, w: lax.cond(x_positive(h), once, once_more, h, w)),
        "custom_vjp_call",
    ),
    "f and scatter_to": (scattered(scatter=lambda v: scatter_rows(f(v))), scattered(), None),
    "residual after f": (after_f(), after_f(none, f), "add"),
    "residual after f, selected": (
        after_f(add=lambda a, b: jnp.where(a > 0, a, b)),
        after_f(none, f, add=lambda a, b: jnp.where(a > 0, a, b)),
        "select_n",
    ),
    "f before a norm's mean": (
        of_params(lambda h, w: once(f(h), w, none) + jnp.square(f(h)).mean()),
        of_params(lambda h, w: once(h, w) + jnp.square(h).mean()),
        "add",
    ),
    "f on the loss": (
        lambda p, x: f(two_layers()(p, x)),
        two_layers(),
        "the loss itself",
    ),
    "f on the logits": (
        lambda p, x: jnp.square(f(x * p["bias"])).sum(),
        lambda p, x: jnp.square(x * p["bias"]).sum(),
        "the loss itself",
    ),
    "gather and scatter on the loss's path": (
        lambda p, x: jnp.square(gather_scatter(scatter_rows(x * p["bias"]))).sum(),
        lambda p, x: jnp.square(x * p["bias"]).sum(),
        "the loss itself",
    ),
    "carry of f": (
        lambda p, x: lax.scan(lambda c, _: (jnp.sin(c), None), f(p["bias"]), None, length=2)[
            0
        ].sum(),
        lambda p, x: jnp.sin(jnp.sin(p["bias"])).sum(),
        "the loss itself",
    ),
}
# An f of what each device has its own of. Types take it, as nothing is done there.
FOREIGN = {
    "a weight": of_params(lambda h, w: once(h, f(w))),
    "a weight, textbook": of_params(lambda h, w: once(h, text_f(w))),
    "sharded activations": lambda p, x: g(jnp.square(f(jnp.tanh(x @ p["up"])) @ p["down"]).sum()),
    "a shard that is scattered": of_params(lambda h, w: once(h, w) + g(scatter_to(w, "mp").sum())),
    "in a scan": lambda p, x: g(
        lax.scan(lambda _, w: (None, jnp.square(f(w)).sum()), None, p["stack"])[1].sum()
    ),
}


@pytest.mark.parametrize("name", EXTRA)
def test_copies_too_many_are_found(name):
    loss, typed, primitive = EXTRA[name]
    varies, (missing, extra, foreign) = verdict(loss, P())
    assert (varies, missing, foreign) == (False, [], [])
    assert primitive is None or extra[0].primitive == primitive
    assert all(is_from_here(x.source) or "loss" in x.primitive for x in extra), extra
    assert not is_right(loss, typed, P())


@pytest.mark.parametrize("name", FOREIGN)
def test_copies_of_what_varies_are_found(name):
    varies, (missing, extra, foreign) = verdict(FOREIGN[name], P())
    assert (varies, missing, extra) == (False, [], [])
    assert all(is_from_here(x.source) for x in foreign), foreign
    assert foreign
    typed = TWINS.get(name, FOREIGN[name])
    assert not is_right(FOREIGN[name], typed, P())
