"""Losses over a manual axis: right ones, of which nothing is said, and those that lack an f."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from variance_operators import (
    apart,
    constant,
    double,
    f,
    g,
    index,
    linear_f,
    noisy,
    none,
    norm,
    straight_through,
    swish,
    text_f,
    text_g,
)
from variance_programs import (
    TWINS,
    attention,
    barrier,
    branch,
    dropout,
    experts,
    fused_blocks,
    gathered,
    later_carry,
    masked,
    megatron_sequence,
    of_params,
    once,
    owners,
    penalty,
    regularised,
    residual,
    ring,
    scanned,
    scattered,
    sequence,
    slice_by_index,
    solve,
    through_ref,
    two_layers,
    varying_carry,
    vocabulary,
)
from variance_verdicts import NONE, VARYING, D, M, cases, is_from_here, is_right, name_of, verdict

from gradaccum.tensor_parallel import copy_to


def aux(p, x):
    """The loss is right; what is reported beside it is not differentiated."""
    loss = two_layers()(p, x)
    return loss, x @ (p["scale"].T * p["up"])


RIGHT = {
    "two layers": two_layers(),
    "residual": residual(),
    "textbook f and g": residual(text_f, g=text_g),
    "textbook f between": two_layers(text_f, text_f, text_g),
    "attention": attention(),
    "vocabulary": vocabulary(),
    "gather": gathered(),
    "scatter": scattered(),
    "batch meets weights": lambda p, x: jnp.square(g(jnp.tanh(x @ p["up"]) @ p["down"])).sum(),
    "dropout": dropout(),
    "dropout of each device": dropout(fold=lambda key: jax.random.fold_in(key, index())),
    "scan": scanned(),
    "scan of remat": scanned(wrap=jax.checkpoint),
    "scan of jit": scanned(wrap=jax.jit),
    "custom_vjp": residual(act=swish),
    "custom_vjp before f": of_params(lambda h, w: once(swish(h), w)),
    "custom_jvp": residual(act=straight_through),
    "softmax, logsumexp": of_params(
        lambda h, w: once(jax.nn.softmax(h) + jax.nn.logsumexp(h, -1, keepdims=True), w)
    ),
    "vmap": of_params(lambda h, w: jax.vmap(lambda r: once(r, w))(h).sum()),
    "masked": masked(),
    "branch": branch(),
    "branch on data": lambda p, x: two_layers()(
        p, x + lax.cond(x.sum() > 0, jnp.sin, jnp.cos, p["bias"])
    ),
    "carry from zeros": varying_carry(none, lambda p: jnp.zeros((1, D))),
    "carry": varying_carry(),
    "later carry": later_carry(),
    "gradient penalty": penalty(),
    "aux": aux,
    "stop_gradient": of_params(lambda h, w: once(h, w) + once(lax.stop_gradient(h), w, none)),
    "stop_gradient of the result": of_params(
        lambda h, w: once(h, w) + lax.stop_gradient(once(h, w, none))
    ),
    "custom stop_gradient": of_params(lambda h, w: once(h, w) + once(constant(h), w, none)),
    "compared": of_params(lambda h, w: once(h, w) + g(jnp.where(h.sum() > w, w, 2 * w).sum())),
    "counted": of_params(lambda h, w: once(h, w) * (lax.psum((w > 0).sum(), "mp") + 1)),
    "count enters": of_params(
        lambda h, w: g((f(h).sum() / g(jnp.ones(())) * w).sum()) * g(jnp.ones(()))
    ),
    "f twice used": of_params(lambda h, w: (k := f(h), once(k, w, none) + once(2 * k, w, none))[1]),
}
RIGHT |= {
    "two results of custom_vjp": of_params(
        lambda h, w: (r := apart(f(h), h), once(r[0], w, none) + r[1].sum())[1]
    ),
    "custom_vjp of a key": of_params(lambda h, w: once(noisy(jax.random.key(1), h, 3), w)),
    "linear_call": of_params(lambda h, w: once(double(h), w)),
    "f as a linear_call": of_params(lambda h, w: once(linear_f(h), w, none)),
    "fused": fused_blocks(),
    "ring": ring,
    "owners": owners(),
    "regularised": regularised(lambda k: g if VARYING[k] else none),
    "optimization_barrier": barrier,
    "ref": of_params(lambda h, w: once(through_ref(h), w)),
    "linear solve": solve,
    "f in a branch": of_params(
        lambda h, w: lax.cond(h.sum() > 0, lambda: once(h, w), lambda: once(2 * h, w))
    ),
    "f at the end of a branch": of_params(
        lambda h, w: once(lax.cond(h.sum() > 0, lambda: f(h), lambda: f(2 * h)), w, none)
    ),
    "over two axes": residual(lambda v: copy_to(v, ("dp", "mp"))),
}
RIGHT_SPLIT = {  # the batch is split over the axis
    "sequence": sequence(),
    "Megatron sequence": megatron_sequence(),
    "experts": experts(),
}

ENTRIES = {
    "first of two layers": (two_layers(f1=none), "dot_general"),
    "second of two layers": (two_layers(f2=none), "dot_general"),
    "second, textbook": (two_layers(text_f, none, text_g), "dot_general"),
    "residual": (residual(none), "dot_general"),
    "attention": (attention(none), "dot_general"),
    "vocabulary: embedding": (vocabulary(f_table=none), "dot_general"),
    "vocabulary: logits": (vocabulary(f_logits=none), "dot_general"),
    "gather": (gathered(none), "dot_general"),
    "scatter: bias": (scattered(none), "add"),
    "scatter: plain slice": (scattered(scatter=slice_by_index), "dynamic_slice"),
    "dropout": (dropout(none), "dot_general"),
    "dropout of each device": (
        dropout(none, lambda key: jax.random.fold_in(key, index())),
        "mul",
    ),
    "scan": (scanned(none), "dot_general"),
    "scan of remat": (scanned(none, jax.checkpoint), "dot_general"),
    "scan of jit": (scanned(none, jax.jit), "dot_general"),
    "before custom_vjp": (of_params(lambda h, w: once(swish(h), w, none)), "mul"),
    "before custom_jvp": (of_params(lambda h, w: once(straight_through(h), w, none)), "mul"),
    "in custom_jvp": (
        of_params(lambda h, w: g(jnp.logaddexp(h.sum(), w).sum())),
        None,
    ),
    "scale after f": (
        lambda p, x: jnp.square(g(norm(f(x + p["bias"]), p["scale"]) @ p["up"] @ p["down"])).sum(),
        "dot_general",
    ),
    "scale of sharded activations": (
        lambda p, x: g(jnp.square(norm((x @ p["up"])[:, :4], p["scale"][:, :4])).sum()),
        "mul",
    ),
    "vmap": (of_params(lambda h, w: jax.vmap(lambda r: once(r, w, none))(h).sum()), "mul"),
    "masked": (masked(none), "select_n"),
    "selected": (masked(none, lambda p, a, b: lax.select(p, a, jnp.zeros_like(a))), "select_n"),
    "branch": (branch(none), "cond"),
    "carry": (varying_carry(none), "scan"),
    "later carry": (later_carry(none), "scan"),
    "beside stop_gradient": (
        of_params(lambda h, w: once(h + lax.stop_gradient(h), w, none)),
        "mul",
    ),
}
ENTRIES |= {
    "custom_vjp of a key": (
        of_params(lambda h, w: once(noisy(jax.random.key(1), h, 3), w, none)),
        "mul",
    ),
    "linear_call": (of_params(lambda h, w: once(double(h), w, none)), "mul"),
    "after fused": (fused_blocks(none), "dot_general"),
    "owners": (owners(none), "dynamic_slice"),
    "regularised": (regularised(lambda _: g), "custom_vjp_call"),
    "mean of a replicated loss": (
        lambda p, x: g(two_layers()(p, x)) / M,
        "custom_vjp_call",
    ),
    "textbook sum of a replicated loss": (
        lambda p, x: text_g(two_layers()(p, x)),
        "custom_vjp_call",
    ),
    "ref": (of_params(lambda h, w: once(through_ref(h), w, none)), "mul"),
    "f over another axis": (residual(lambda v: copy_to(v, "dp")), "dot_general"),
}
ENTRIES_SPLIT = {
    "sequence: all": (sequence(none), "mul"),
    "sequence: one": (sequence(f_square=none), "dot_general"),
    "Megatron sequence": (megatron_sequence(none), "mul"),
    "experts": (experts(none), "dot_general"),
}


@pytest.mark.parametrize(("loss", "x_spec"), cases(RIGHT, RIGHT_SPLIT))
def test_right_programs_are_not_reported(loss, x_spec, request):
    assert verdict(loss, x_spec) == (False, NONE)
    assert is_right(loss, TWINS.get(name_of(request), loss), x_spec)


@pytest.mark.parametrize(("case", "x_spec"), cases(ENTRIES, ENTRIES_SPLIT))
def test_entries_are_found(case, x_spec, request):
    loss, primitive = case
    varies, (entries, *_) = verdict(loss, x_spec)
    assert not varies
    assert entries
    assert primitive is None or entries[0].primitive == primitive
    assert all(is_from_here(row.source) for row in entries), entries
    assert not is_right(loss, TWINS.get(name_of(request), loss), x_spec)
