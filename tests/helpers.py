"""What the equivalence tests share: models, the float64 reference, tolerances, jaxpr walks."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

import gradaccum

# Allowed error of a value, relative to the largest entry of its array, by the dtype in which it
# is returned: a few roundings, far below the 1/k, 1/n or 2 of a wrong normalisation.
TOLERANCE = {
    "float64": 1e-12,
    "complex64": 1e-5,
    "float32": 1e-5,
    "bfloat16": 2e-2,
    "float16": 3e-3,
}

# What a program costs to compile matters here, not what it costs to run: the flags halve the
# suite's time. jax 0.12 has only the emitters that are fast to run, and aborts at the last flag.
COMPILE_FAST = {"xla_backend_optimization_level": 0}
XLA_FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    XLA_FLAGS += " --xla_cpu_use_fusion_emitters=false"


def assert_close(got, want, dtype=None, within=None):
    """Asserts two trees equal up to `TOLERANCE`, each leaf against its own largest entry."""
    got, tree = jax.tree_util.tree_flatten_with_path(got)
    assert tree == jax.tree.structure(want)
    for (path, a), b in zip(got, jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        tolerance = within or TOLERANCE[str(dtype or a.dtype)]
        a, b = (np.asarray(x).astype(np.result_type(x.dtype, np.float64)) for x in (a, b))
        assert np.all(np.isfinite(a)), jax.tree_util.keystr(path)
        error, size = np.max(np.abs(a - b)), np.max(np.abs(b))
        assert error <= tolerance * size, (
            f"{jax.tree_util.keystr(path) or 'value'}: off by {error:.3g}, the largest entry is "
            f"{size:.3g}, allowed {tolerance:.1g} of that"
        )


def data_mesh(n, axis_type=jax.sharding.AxisType.Auto):
    """Returns a mesh of the first n devices, all along 'dp'."""
    return jax.make_mesh((n,), ("dp",), axis_types=(axis_type,), devices=jax.devices()[:n])


def equations(jaxpr):
    """Yields every equation of a jaxpr, nested ones included."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, tuple | list) else (value,):
                if isinstance(item, jex_core.Jaxpr | jex_core.ClosedJaxpr):
                    yield from equations(item)


def count_primitive(fun, name, *args):
    """Returns how many equations of the traced function are this primitive, at any depth."""
    return sum(e.primitive.name == name for e in equations(jax.make_jaxpr(fun)(*args)))


def count_in_place(fun, *args):
    """Returns how many accumulators the traced function reads back from a ref."""
    return count_primitive(fun, "freeze", *args)


# --- The models of the grid: parameters, batch -> losses of all tokens, [B, T] -------------------

B, T, D, V = 64, 3, 4, 7


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def numbers(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def dense(p, batch):
    h = jnp.tanh(batch["x"][:, 0] @ p["w1"] + p["b1"][None])
    return (h @ p["w2"] - batch["y"]) ** 2


def tied_embedding(p, batch):
    """Input and output share one table, so its gradient is scattered and multiplied."""
    logits = jnp.tanh(p["table"][batch["ids"]] @ p["mix"]) @ p["table"].T
    return -jnp.take_along_axis(
        jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1
    ).squeeze(-1)


def transformer(p, batch):
    """Two attention blocks, stacked: scanned, each recomputed in its backward pass."""

    @jax.checkpoint
    def block(h, layer):
        q, k, v = jnp.split(h @ layer["qkv"], 3, axis=-1)
        scores = jnp.where(jnp.tri(T, dtype=bool)[None], q @ k.mT / 2, -jnp.inf)
        h = h + jax.nn.softmax(scores) @ v
        return h + jnp.tanh(h @ layer["up"]) @ layer["down"], None

    h, _ = jax.lax.scan(block, batch["x"], p["layers"])
    return ((h @ p["head"]).squeeze(-1) - batch["y"]) ** 2


def rnn(p, batch):
    """A recurrence whose carry starts from zeros: ordinary, yet untypeable under check_vma=True."""

    def cell(h, x):
        h = jnp.tanh(x @ p["wx"] + h @ p["wh"])
        return h, (h @ p["out"]).squeeze(-1)

    start = jnp.zeros((batch["x"].shape[0], D))
    _, y = jax.lax.scan(cell, start, jnp.swapaxes(batch["x"], 0, 1))
    return (jnp.swapaxes(y, 0, 1) - batch["y"]) ** 2


MODELS = {f.__name__: f for f in (dense, tied_embedding, transformer, rnn)}


def init(model, dtype):
    """Returns parameters of one model, as NumPy-made arrays of this dtype."""
    shapes = {
        "dense": {"w1": (D, 5), "b1": (5,), "w2": (5, T)},
        "tied_embedding": {"table": (V, D), "mix": (D, D)},
        "transformer": {
            "layers": {"qkv": (2, D, 3 * D), "up": (2, D, 5), "down": (2, 5, D)},
            "head": (D, 1),
        },
        "rnn": {"wx": (D, D), "wh": (D, D), "out": (D, 1)},
    }[model]
    leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(
        tree, [jnp.asarray(normal(i, *s) / 2).astype(dtype) for i, s in enumerate(leaves)]
    )


def make_batch():
    """Returns a batch of B rows; mask has unequal counts, and 16 rows on end without a token."""
    rng = np.random.default_rng(7)
    mask = rng.integers(0, 2, (B, T))
    mask[16:32] = 0
    return {
        "x": normal(5, B, T, D).astype(np.float32),
        "y": normal(6, B, T).astype(np.float32),
        "ids": rng.integers(0, V, (B, T), dtype=np.int32),
        "targets": rng.integers(0, V, (B, T), dtype=np.int32),
        "mask": mask.astype(np.float32),
    }


def loss_of(model, reduction):
    """Returns the loss function: 'mean' over tokens, their 'sum', or the mean of masked 'tokens'.

    The last is 0/0 where no token is valid, as such losses are.
    """

    def loss_fn(params, batch):
        losses = MODELS[model](params, batch)
        if reduction == "tokens":
            return jnp.sum(batch["mask"] * losses) / jnp.sum(batch["mask"])
        return jnp.mean(losses) if reduction == "mean" else jnp.sum(losses)

    return loss_fn


def count_tokens(batch):
    return batch["mask"].sum()


@functools.cache
def _reference(model, reduction):
    return jax.jit(jax.value_and_grad(loss_of(model, reduction)), compiler_options=COMPILE_FAST)


def reference(model, reduction, params, batch):
    """Returns loss and gradients of one full batch, in float64 from these very values."""
    with jax.enable_x64(True):
        wide = lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, np.floating) else x  # noqa: E731
        params, batch = jax.tree.map(wide, (jax.tree.map(np.asarray, params), batch))
        return jax.device_get(_reference(model, reduction)(params, batch))


def accumulated(model, reduction, **options):
    """Returns the decorated loss of a model."""
    if reduction == "tokens":
        options["weight_fn"] = count_tokens
    if reduction == "sum":
        options["loss_reduction"] = "sum"
    return gradaccum.accumulate(loss_of(model, reduction), **options)


def pairwise(factors, seed=0):
    """Returns few cases that hold every pair of values of every two factors, deterministically.

    Args:
      factors: name -> values.

    Returns:
      A list of dicts, name -> value.
    """
    rng = np.random.default_rng(seed)
    names = list(factors)
    pairs = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    cases = []
    while pairs:
        first = min(pairs, key=repr)
        best, most = None, -1
        for _ in range(200):
            case = {n: values[rng.integers(len(values))] for n, values in factors.items()}
            case.update(dict(first))
            covered = sum(p in pairs for p in itertools.combinations(case.items(), 2))
            if covered > most:
                best, most = case, covered
        cases.append(best)
        pairs -= set(itertools.combinations(best.items(), 2))
    return cases
