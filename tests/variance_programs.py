"""Losses over a manual axis, as functions of the f in them."""

import jax
import jax.numpy as jnp
from jax import lax
from variance_operators import f, fused, g, gather_scatter, index, none, norm, scatter_gather
from variance_verdicts import B, D, H, M

from gradaccum.tensor_parallel import gather_from, scatter_to


def two_layers(f1=f, f2=f, g=g):
    """The input isn't differentiated: its f is for the norm's scale."""

    def loss(p, x):
        h = g(jnp.tanh(f1(norm(x, p["scale"])) @ p["up"]) @ p["down"]) + p["bias"]
        return jnp.square(g(jnp.tanh(f2(h) @ p["up"]) @ p["down"])).sum()

    return loss


def residual(f=f, act=jax.nn.gelu, g=g):
    def loss(p, x):
        h = x + p["bias"]
        for _ in range(2):
            h = h + g(act(f(norm(h, p["scale"])) @ p["up"]) @ p["down"])
        return jnp.square(h).mean()

    return loss


def attention(f=f):
    def loss(p, x):
        h = f(norm(x, p["scale"]))
        heads = jax.vmap(lambda w: (h @ w).reshape(B, 2, -1))(p["stack"])
        q, k, v = heads
        scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k))
        out = jnp.einsum("hqk,khd->qhd", scores, v).reshape(B, -1)
        return jnp.square(g(out @ p["down"]) + x).sum()

    return loss


def scanned(f=f, wrap=none, act=jax.nn.relu):
    def loss(p, x):
        @wrap
        def layer(h, w):
            up, down = w
            return h + g(act(f(norm(h, p["scale"])) @ up) @ down), h.sum()

        h, sums = lax.scan(layer, x + p["bias"], (p["stack"], p["back"]))
        return jnp.square(h).sum() + sums.mean()

    return loss


def vocabulary(f_table=f, f_logits=f):
    """Embedding and cross entropy, both split over the words."""

    def loss(p, x):
        words = p["table"].shape[0]
        tokens = (jnp.abs(x) * 4).astype(jnp.int32)[:, 0] % H
        mine = tokens - index() * words
        here = (mine >= 0) & (mine < words)
        mine = jnp.where(here, mine, 0)
        rows = jnp.where(here[:, None], p["table"][mine], 0)
        h = f_table(norm(g(rows), p["scale"])) @ p["up"]
        h = g(jnp.tanh(h) @ p["down"])
        logits = f_logits(h) @ p["table"].T
        top = lax.pmax(lax.stop_gradient(logits.max(-1)), "mp")
        total = g(jnp.exp(logits - top[:, None]).sum(-1))
        target = g(jnp.where(here, jnp.take_along_axis(logits, mine[:, None], 1)[:, 0], 0))
        return (jnp.log(total) + top - target).mean()

    return loss


def sequence(f=f, f_square=None):
    """The batch is split over the axis: parameters that all devices use are to be copied."""
    f_square = f_square or f

    def loss(p, x):
        h = norm(x, f(p["scale"])) @ f_square(p["square"]) + f(p["bias"])
        return g(jnp.square(jnp.tanh(h)).sum()) / B

    return loss


def megatron_sequence(f=f, gather=gather_scatter):
    """Activations split by rows between the blocks and by features in them."""

    def loss(p, x):
        h = norm(x, f(p["scale"]))
        h = h + scatter_gather(jnp.tanh(gather(h) @ p["up"]) @ p["down"])
        return g(jnp.square(h).sum())

    return loss


def experts(f=f):
    """Tokens are split; each device holds an expert."""

    def loss(p, x):
        gate = jax.nn.sigmoid(x @ f(p["scale"]).T)
        sent = lax.all_to_all(x, "mp", 0, 0, tiled=True)
        out = jnp.tanh(sent @ p["up"]) @ p["down"]
        return g(jnp.square(gate * lax.all_to_all(out, "mp", 0, 0, tiled=True)).sum())

    return loss


def masked(f=f, where=jnp.where):
    """A bias added on one device alone."""

    def loss(p, x):
        return jnp.square(g(x @ p["up"] @ p["down"] + where(index() == 0, f(p["bias"]), 0.0))).sum()

    return loss


def branch(f=f):
    def loss(p, x):
        h = x @ p["up"] @ p["down"]
        h = h + lax.cond(index() == 0, lambda v: v, jnp.zeros_like, f(p["bias"]))
        return jnp.square(g(h)).sum()

    return loss


def unrolled(body, carry, xs):
    """A scan without types of the carry."""
    for i in range(3):
        carry, _ = body(carry, xs[i])
    return carry, None


def varying_carry(f=f, start=lambda p: p["bias"], scan=lax.scan):
    """A carry that varies from the second iteration on."""

    def loss(p, x):
        step = lambda c, w: (c + x.sum() * w.sum(), None)  # noqa: E731
        c, _ = scan(step, f(start(p)), p["stack"])
        return g(jnp.square(c).sum())

    return loss


def later_carry(f=f, scan=lax.scan):
    """A carry that varies at first, and is shared from the second iteration on."""

    def loss(p, x):
        step = lambda c, w: ((f(p["bias"]), c[0].mean() + c[1]), None)  # noqa: E731
        start = jnp.square(p["up"]).sum() * jnp.ones((1, D))
        return g(jnp.square(scan(step, (start, 0.0), jnp.ones(3))[0][1]))

    return loss


def dropout(f=f, fold=none):
    def loss(p, x):
        h = norm(x, p["scale"])
        key = fold(jax.random.key(3))
        h = f(h) * jax.random.bernoulli(key, 0.5, h.shape)
        return jnp.square(g(h @ p["up"] @ p["down"])).sum()

    return loss


def penalty(f=f):
    """A loss with the squared gradient by the input."""

    def loss(p, x):
        def energy(x):
            return jnp.square(g(jnp.tanh(f(x * p["scale"]) @ p["up"]) @ p["down"])).sum()

        return energy(x) + jnp.square(jax.grad(energy)(x)).sum()

    return loss


def fused_blocks(f=f):
    def loss(p, x):
        h = norm(x, p["scale"])
        h = fused(h, p["up"], p["down"]) + p["bias"]
        return jnp.square(g(jnp.tanh(f(h) @ p["up"]) @ p["down"])).sum()

    return loss


def ring(p, x):
    q = f(norm(x, p["scale"])) @ p["up"]
    return g(jnp.square(q * lax.ppermute(q, "mp", [(0, 1), (1, 0)])).sum())


def owners(f=f):
    """Tokens on all devices, each of which computes its own expert's part of them."""

    def loss(p, x):
        gate = f(jax.nn.softmax(x @ p["square"][:, :M]))[:, index()][:, None]
        return jnp.square(g(gate * (jnp.tanh(x @ p["up"]) @ p["down"]))).sum()

    return loss


def regularised(g_of):
    """The sum of squares of all parameters, each counted once."""

    def loss(p, x):
        squares = [g_of(k)(jnp.square(v).sum()) for k, v in p.items()]
        return residual()(p, x) + sum(squares)

    return loss


def barrier(p, x):
    a, b = lax.optimization_barrier((p["local"], p["bias"]))
    return jnp.square(b).sum() + g(jnp.square(a).sum())


def through_ref(v):
    ref = jax.new_ref(v)
    return ref[...]


def solve(p, x):
    a = p["square"] @ p["square"].T + jnp.eye(D)
    return jnp.square(jnp.linalg.solve(a, x.T)).sum() + two_layers()(p, x)


def gathered(f=f):
    def loss(p, x):
        y = gather_from(f(x * p["scale"]) @ p["up"], "mp")
        return jnp.square(jax.nn.log_softmax(y)).sum()

    return loss


def scatter_rows(v):
    return scatter_to(v, "mp", 0)


def scattered(f=f, scatter=scatter_rows):
    def loss(p, x):
        h = scatter(x * p["scale"])
        return g(jnp.square(jnp.tanh(h + f(p["bias"]))).sum())

    return loss


def slice_by_index(v):
    size = v.shape[0] // M
    return lax.dynamic_slice_in_dim(v, index() * size, size, 0)


def once(h, w, f=f):
    """A sharded function of h [B, D] and w [H / M]."""
    return jnp.square(g(jnp.tanh(f(h).sum() * w).sum()))


def of_params(fun):
    """A loss of what `fun` makes of the replicated bias and the local weights."""
    return lambda p, x: fun(x * p["bias"], p["local"])


def own_part(w):
    size = w.shape[-1] // M
    return lax.dynamic_slice_in_dim(w, index() * size, size, -1)


# What JAX's types accept of the programs that they don't: their custom_vjp functions and carries.
TWINS = {
    "textbook f and g": residual(),
    "textbook f between": two_layers(),
    "second, textbook": two_layers(),
    "Megatron sequence": megatron_sequence(gather=lambda v: lax.all_gather(v, "mp", tiled=True)),
    "fused": two_layers(),
    "after fused": two_layers(),
    "textbook sum of a replicated loss": lambda p, x: g(two_layers()(p, x)),
    "f as a linear_call": of_params(once),
    # Typed, it makes all its results vary (jax 0.10.2), and their cotangents are summed.
    "optimization_barrier": lambda p, x: (
        jnp.square(p["bias"]).sum() + g(jnp.square(p["local"]).sum())
    ),
    "a weight, textbook": of_params(once),
    "a shard that is scattered": of_params(lambda h, w: once(h, w) + g(own_part(w).sum())),
    "carry from zeros": varying_carry(none, lambda p: jnp.zeros((1, D)), unrolled),
    "carry": varying_carry(scan=unrolled),
    "later carry": later_carry(scan=unrolled),
}
