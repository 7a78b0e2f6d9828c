"""What differs over a manual axis, and what enters it without an f: right and wrong programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from gradaccum._copies import misused_copies
from gradaccum._variance import varying_outputs
from gradaccum.tensor_parallel import copy_to, gather_from, reduce_from, scatter_to

M = 2  # devices along "mp"
B, D, H = 4, 6, 8  # rows, features, hidden features

# f and g as they stand in textbooks.


@jax.custom_vjp
def text_f(v):
    return v


text_f.defvjp(lambda v: (v, None), lambda _, ct: (lax.psum(ct, "mp"),))


@jax.custom_vjp
def text_g(v):
    return lax.psum(v, "mp")


text_g.defvjp(lambda v: (lax.psum(v, "mp"), None), lambda _, ct: (ct,))


@jax.custom_vjp
def gather_scatter(v):
    """Gathers what enters sharded computation again: Megatron's g of sequence parallelism."""
    return lax.all_gather(v, "mp", tiled=True)


gather_scatter.defvjp(
    lambda v: (gather_scatter(v), None),
    lambda _, ct: (lax.psum_scatter(ct, "mp", tiled=True),),
)


@jax.custom_vjp
def scatter_gather(v):
    """The sum of the devices' parts, of which each takes its slice."""
    return lax.psum_scatter(v, "mp", tiled=True)


scatter_gather.defvjp(
    lambda v: (scatter_gather(v), None),
    lambda _, ct: (lax.all_gather(ct, "mp", tiled=True),),
)


@jax.custom_vjp
def swish(v):
    return v * jax.nn.sigmoid(v)


swish.defvjp(
    lambda v: (swish(v), v),
    lambda v, ct: (ct * jax.nn.sigmoid(v) * (1 + v * (1 - jax.nn.sigmoid(v))),),
)


@jax.custom_vjp
def constant(v):
    return v


constant.defvjp(lambda v: (v, None), lambda _, ct: (jnp.zeros_like(ct),))


@jax.custom_vjp
def apart(a, b):
    return 2 * a, 3 * b


apart.defvjp(lambda a, b: (apart(a, b), None), lambda _, ct: (2 * ct[0], 3 * ct[1]))


@jax.custom_vjp
def noisy(key, v, n):
    return n * v * jax.random.uniform(key, v.shape)


noisy.defvjp(
    lambda key, v, n: (noisy(key, v, n), (key, n)),
    lambda kept, ct: (None, kept[1] * ct * jax.random.uniform(kept[0], ct.shape), None),
)


@jax.custom_vjp
def fused(h, up, down):
    """A block with its f and g in one rule."""
    return lax.psum(jnp.tanh(h @ up) @ down, "mp")


def fused_forward(*args):
    y, transpose = jax.vjp(lambda h, up, down: jnp.tanh(h @ up) @ down, *args)
    return lax.psum(y, "mp"), transpose


def fused_backward(transpose, ct):
    h, up, down = transpose(ct)
    return lax.psum(h, "mp"), up, down


fused.defvjp(fused_forward, fused_backward)


def linear_f(v):
    return jax.custom_derivatives.linear_call(
        lambda _, v: v, lambda _, ct: lax.psum(ct, "mp"), (), v
    )


def double(v):
    return jax.custom_derivatives.linear_call(lambda _, v: 2 * v, lambda _, ct: 2 * ct, (), v)


@jax.custom_jvp
def straight_through(v):
    return v.astype(jnp.int32).astype(v.dtype)


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), *tangents))


def f(v):
    return copy_to(v, "mp")


def g(v):
    return reduce_from(v, "mp")


def none(v):
    return v


def index():
    return lax.axis_index("mp")


def norm(h, scale):
    h = h - h.mean(-1, keepdims=True)
    return scale * h * lax.rsqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-3)


PARAMS = {
    "up": P(None, "mp"),  # [D, H]
    "down": P("mp"),  # [H, D]
    "table": P("mp"),  # [H, D]: a row for each word
    "stack": P(None, None, "mp"),  # [3, D, H]
    "back": P(None, "mp"),  # [3, H, D]
    "local": P(None, "mp"),  # [1, H]
    "scale": P(),  # [1, D]
    "bias": P(),  # [1, D]
    "square": P(),  # [D, D]
}
SHAPES = {
    "up": (D, H),
    "down": (H, D),
    "table": (H, D),
    "stack": (3, D, H),
    "back": (3, H, D),
    "local": (1, H),
    "scale": (1, D),
    "bias": (1, D),
    "square": (D, D),
}
NONE = ([], [], [])  # no copy missing, too many, or of a value that varies
VARYING = {k: "mp" in spec for k, spec in PARAMS.items()}


def params():
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    return {
        k: 0.5 * jax.random.normal(key, s) for key, (k, s) in zip(keys, SHAPES.items(), strict=True)
    }


def batch():
    return jax.random.normal(jax.random.key(1), (B, D))


def manual(fun, **options):
    types = 2 * (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((1, M), ("dp", "mp"), axis_types=types, devices=jax.devices()[:M])
    return jax.jit(jax.shard_map(fun, mesh=mesh, **options))


def verdict(loss, x_spec):
    """Returns (whether the loss varies, the misused copies) of a loss of (params, batch)."""
    found = []

    def local(p, x):
        def flat(*leaves):
            return loss(*jax.tree.unflatten(tree, leaves))

        leaves, tree = jax.tree.flatten((p, x))
        jaxpr = jax.make_jaxpr(flat)(*leaves)
        active = [True] * len(p) + [False]
        varying = [VARYING[k] for k in sorted(p)] + ["mp" in x_spec]
        count = len(jax.tree.leaves(jax.eval_shape(loss, p, x)))
        live = [i == 0 for i in range(count)]
        found.append(
            (
                varying_outputs(jaxpr, varying, "mp")[0],
                misused_copies(jaxpr, active, live, varying, "mp"),
            )
        )
        return jnp.zeros(())

    specs = {"in_specs": (PARAMS, x_spec), "out_specs": P(), "check_vma": False}
    jax.eval_shape(manual(local, **specs), params(), batch())
    return found[0]


def gradients(loss, x_spec, check_vma):
    """Returns the gradients that each device has, those of replicated parameters side by side."""

    def scalar(p, x):
        value = jax.tree.leaves(loss(p, x))[0]
        return value

    def local(p, x):
        grads = jax.grad(scalar)(p, x)
        # Each device's own, so that it shows where they differ.
        return {k: v if VARYING[k] else v[None] for k, v in grads.items()}

    out = {k: spec if VARYING[k] else P(None if check_vma else "mp") for k, spec in PARAMS.items()}
    specs = {"in_specs": (PARAMS, x_spec), "out_specs": out, "check_vma": check_vma}
    return manual(local, **specs)(params(), batch())


def is_right(loss, typed, x_spec):
    """Whether untyped gradients are those that JAX's types give, on all devices."""
    got, want = gradients(loss, x_spec, False), gradients(typed, x_spec, True)
    return all(np.allclose(got[k], want[k], rtol=2e-3, atol=1e-5) for k in got)


# --- Programs, as functions of the f in them ------------------------------------------------------


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


def aux(p, x):
    """The loss is right; what is reported beside it is not differentiated."""
    loss = two_layers()(p, x)
    return loss, x @ (p["scale"].T * p["up"])


def x_positive(h):
    return h.sum() > 0


def own_part(w):
    size = w.shape[-1] // M
    return lax.dynamic_slice_in_dim(w, index() * size, size, -1)


def once_more(h, w):
    return once(2 * h, w)


def after_f(f_before=f, f_inside=none, add=jnp.add):
    """A residual that is taken after the f, as it must not be."""

    def loss(p, x):
        h = f_before(x + p["bias"])
        return jnp.square(add(h, g(jnp.tanh(f_inside(h) @ p["up"]) @ p["down"]))).mean()

    return loss


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
LOSS_VARIES = {
    "no g": two_layers(g=none),
    "local regulariser": lambda p, x: two_layers()(p, x) + jnp.square(p["local"]).sum(),
    "of an index": lambda p, x: x.sum() * index(),
    "gradient penalty": penalty(none),
    "scattered": lambda p, x: scatter_to(p["bias"], "mp").sum(),
}

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


def name_of(request):
    return request.node.callspec.id


def cases(right, split):
    return [
        pytest.param(v, spec, id=k)
        for programs, spec in ((right, P()), (split, P("mp")))
        for k, v in programs.items()
    ]


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
    assert all("test_variance.py:" in row.source for row in entries), entries
    assert not is_right(loss, TWINS.get(name_of(request), loss), x_spec)


@pytest.mark.parametrize("name", EXTRA)
def test_copies_too_many_are_found(name):
    loss, typed, primitive = EXTRA[name]
    varies, (missing, extra, foreign) = verdict(loss, P())
    assert (varies, missing, foreign) == (False, [], [])
    assert primitive is None or extra[0].primitive == primitive
    assert all("test_variance.py:" in x.source or "loss" in x.primitive for x in extra), extra
    assert not is_right(loss, typed, P())


@pytest.mark.parametrize("name", FOREIGN)
def test_copies_of_what_varies_are_found(name):
    varies, (missing, extra, foreign) = verdict(FOREIGN[name], P())
    assert (varies, missing, extra) == (False, [], [])
    assert all("test_variance.py:" in x.source for x in foreign), foreign
    assert foreign
    typed = TWINS.get(name, FOREIGN[name])
    assert not is_right(FOREIGN[name], typed, P())


@pytest.mark.parametrize("name", LOSS_VARIES)
def test_losses_that_vary(name):
    assert verdict(LOSS_VARIES[name], P())[0]


def loop(condition, carry):
    """Returns what a loop carries: a count, a product of indices, and both together."""
    body = lambda c: (c[0] + 1, c[1] * (1 + index()), c[0] + c[1])  # noqa: E731
    return lax.while_loop(condition, body, carry)


# The values of a vector v that varies and a vector x that does not, and which of them vary.
VALUES = {
    "inputs": (lambda v, x: (v, x, 1.0, jnp.zeros(3)), [True, False, False, False]),
    "integers": (lambda v, x: (v > 0, jnp.argmax(v), jnp.argmax(x)), [True, True, False]),
    "stop_gradient": (lax.stop_gradient, [True, False]),
    "index": (lambda v, x: (index(), x * index(), x[index()]), [True, True, True]),
    "reductions": (
        lambda v, x: [op(v, "mp") for op in (lax.psum, lax.pmean, lax.pmax, lax.all_gather)],
        [False] * 4,
    ),
    "over two axes": (lambda v, x: lax.psum(v, ("dp", "mp")), [False]),
    "over another axis": (lambda v, x: (lax.psum(v, "dp"), lax.axis_index("dp")), [True, False]),
    "psum of a tree": (lambda v, x: lax.psum((v, x), "dp"), [True, False]),
    "exchanges": (
        lambda v, x: (
            lax.ppermute(x, "mp", [(0, 1)]),
            lax.all_to_all(x, "mp", 0, 0, tiled=True),
            lax.psum_scatter(x, "mp", tiled=True),
        ),
        [True] * 3,
    ),
    "operators": (
        lambda v, x: (f(x), g(v), gather_from(v, "mp"), scatter_to(x, "mp"), f(v)),
        [False, False, False, True, True],
    ),
    "calls": (lambda v, x: jax.jit(lambda v, x: (x + 1, v + x, g(v)))(v, x), [False, True, False]),
    "branches": (
        lambda v, x: (
            lax.cond(v[0] > 0, jnp.sin, jnp.cos, x),
            lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
            lax.cond(x[0] > 0, lambda: v, lambda: x),
        ),
        [True, False, True],
    ),
    "scan": (
        lambda v, x: lax.scan(lambda c, s: ((c[1], c[1] + s, c[2]), c[0]), (0.0, 0.0, 0.0), v),
        [True, True, False, True],
    ),
    "scan: one later": (
        lambda v, x: lax.scan(lambda c, s: ((c[1], c[2], s), c[0]), (0.0, 0.0, 0.0), v)[0],
        [True, True, True],
    ),
    "loop": (lambda v, x: loop(lambda c: c[0] < 3, (0, 1, 0)), [False, True, True]),
    "loop's condition": (lambda v, x: loop(lambda c: c[1] < 3, (0, 1, 0)), [True, True, True]),
    "loop's constant": (lambda v, x: loop(lambda c: c[0] < v[0], (0, 1, 0)), [True, True, True]),
    "refs": (
        lambda v, x: (r := jax.new_ref(x), r.__setitem__(0, v[0]), r[...], x)[2:],
        [True, False],
    ),
    "custom_jvp": (lambda v, x: (jax.nn.relu(v), jax.nn.relu(x)), [True, False]),
    "monoid": (lambda v, x: lax.reduce(v, 1.0, lambda a, b: a * b, [0]), [True]),
    # Nothing is claimed of it.
    "solver that sums": (
        lambda v, x: lax.custom_linear_solve(lambda y: lax.psum(v * y, "mp"), x, lambda _, b: b),
        [False],
    ),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_that_vary(name):
    fun, expected = VALUES[name]
    found = []

    def local(v, x):
        jaxpr = jax.make_jaxpr(fun if name != "stop_gradient" else lambda *a: fun(a))(v, x)
        found.append(varying_outputs(jaxpr, [True, False], "mp"))
        return v

    specs = {"in_specs": (P("mp"), P()), "out_specs": P("mp"), "check_vma": False}
    jax.eval_shape(manual(local, **specs), jnp.ones(4), jnp.ones(2))
    assert found == [expected]


def test_nothing_is_claimed_of_a_rule_that_raises():
    @jax.custom_vjp
    def broken(v):
        return v

    def backward(_, ct):
        raise NotImplementedError

    broken.defvjp(lambda v: (v, None), backward)
    assert verdict(of_params(lambda h, w: once(broken(h), w, none)), P()) == (False, NONE)


def test_rows():
    """One for each equation, in program order, with the user's line."""

    def fun(h, w):
        total = once(f(h), w, none)
        total = total + g((h.sum() * w).sum())
        return total + g(jnp.where(w > 0, h.sum(), w).sum())

    _, (rows, *_) = verdict(of_params(fun), P())
    line = fun.__code__.co_firstlineno
    assert [row.primitive for row in rows] == ["mul", "select_n"]
    assert [f"test_variance.py:{line + i}:" in row.source for i, row in enumerate(rows, 2)]
