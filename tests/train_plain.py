"""Plain computations for what the training program does, and its step by itself, from flags."""

import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from absl_apps import flag_parsing, meshes, train_flags, train_program, train_state, transformer

T = 16
SIZES = ("--d_model=16", "--n_layer=2", "--n_head=2", f"--seq_len={T}", "--compute_dtype=float32")
BATCH = ("--global_batch=8", "--microbatches=2", "--mesh=dp=2")


def parse(*args):
    values = flags.FlagValues()
    train_flags.parse(["train", *SIZES, *BATCH, *args], values, manual="The manual.")
    return values


######################################## Plain computations ######################################


@functools.partial(jax.jit, static_argnums=2, compiler_options=helpers.COMPILE_FAST)
def plain(params, batch, config):
    """(mean loss of the batch's targets, their number), and gradients."""

    def mean(params):
        logits = transformer.apply(params, batch["tokens"][:, :-1], config)
        logits = logits[..., : config.vocab_size]
        logits -= jnp.max(logits, axis=-1, keepdims=True)
        targets = jnp.asarray(batch["tokens"][:, 1:], int)[..., None]
        chosen = jnp.take_along_axis(logits, targets, -1)[..., 0]
        losses = jnp.log(jnp.sum(jnp.exp(logits), axis=-1)) - chosen
        count = jnp.sum(batch["mask"])
        return jnp.sum(jnp.where(batch["mask"], losses, 0)) / count, count

    return jax.value_and_grad(mean, has_aux=True)(params)


def exact(params, batch, vocab_size):
    """`plain` in float64."""
    config = transformer.Config(16, 2, 2, "float64", vocab_size)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        return jax.device_get(plain(params, batch, config))


def norm_of(tree):
    return math.sqrt(sum(np.sum(x * x) for x in jax.tree.leaves(tree)))


def cut(tokens, end):
    """All sequences of tokens: the last is padded, and no beginning of a document is a target."""
    n = -(-(len(tokens) - 1) // T)
    padded = np.zeros(n * T + 1, np.int64)
    padded[: len(tokens)] = tokens
    counts = np.arange(n * T + 1) < len(tokens)
    counts[1:] &= padded[:-1] != end
    rows = T * np.arange(n)[:, None] + np.arange(T + 1)
    return {"tokens": padded[rows], "mask": counts[rows][:, 1:]}


def rate(step, steps, warmup, peak):
    """A line up from peak / (warmup + 1), and a line down to peak / 10."""
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return peak * (1 - 0.9 * (step - warmup) / (steps - warmup))


def replay(train_on, vocab_size, steps, peak, warmup, held_out, evaluated):
    """Lines of metrics, of sgd with momentum 0.9 whose gradients are clipped to norm 1."""
    config = transformer.Config(16, 2, 2, vocab_size=vocab_size)
    params = jax.tree.map(np.float64, transformer.init(jax.random.key(0), config))
    momentum, lines = jax.tree.map(np.zeros_like, params), []
    add = lambda tree, other, factor: jax.tree.map(lambda x, y: x + factor * y, tree, other)  # noqa: E731
    for step in range(steps):
        (loss, _), grads = exact(params, train_on[step], vocab_size)
        norm, lr = norm_of(grads), rate(step, steps, warmup, peak)
        momentum = add(jax.tree.map(lambda m: 0.9 * m, momentum), grads, 1 / max(1, norm))
        params = add(params, momentum, -lr)
        lines.append({"loss": loss, "gradient_norm": norm, "learning_rate": lr})
        if step in evaluated:
            lines[-1]["eval_loss"] = exact(params, held_out, vocab_size)[0][0]
    return lines


########################################### Single steps ###########################################


def described(*args):
    values = parse(*args)
    chosen = flag_parsing.chosen(values, train_flags.GROUPS)
    mesh = meshes.make(meshes.parse(values.mesh), "")
    return train_program.describe(chosen, mesh)


def params_of(program):
    """Parameters on the host whose head is not zero, and is large where it is padding."""
    config = program.setup.config
    params = transformer.init(jax.random.key(0), config)
    head = np.array(jax.random.normal(jax.random.key(1), params["head"].shape))
    head[:, config.vocab_size :] = 9
    return jax.tree.map(np.array, params | {"head": head})


class Stepper:
    """The step of some flags, compiled; `measured` and `params` are of one call."""

    def __init__(self, *args):
        self.program = described("--optimizer=sgd", "--clip_norm=0", *args)
        self.params = params_of(self.program)
        self.lowered = self.program.step(2).lower(*self.program.args)
        self.step = self.lowered.compile(compiler_options=helpers.COMPILE_FAST)
        init = functools.partial(train_state.init_state, setup=self.program.setup)
        self.init = jax.jit(init, compiler_options=helpers.COMPILE_FAST)

    def state(self, seed=0):
        where = jax.tree.map(lambda x: x.sharding, self.program.state)
        state = self.init(jax.random.key(seed))
        return jax.device_put(state._replace(params=self.params), where)

    def __call__(self, *calls, first=0, seed=0):
        """Takes calls, one after the other; returns what the last measures, and the parameters."""
        state = self.state(seed)
        for i, batch in enumerate(calls, start=first):
            tokens = np.asarray(batch["tokens"], self.program.batch["tokens"].dtype)
            placed = {"tokens": tokens, "mask": batch["mask"]}
            where = {name: x.sharding for name, x in self.program.batch.items()}
            state, measured = self.step(state, jax.device_put(placed, where), np.int32(i))
        return jax.device_get((measured, state.params))


def unequal(vocab_size=300):
    """Eight rows of 0 to 14 targets: of two devices' two microbatches, one has none at all."""
    rng = np.random.default_rng(1)
    counts = np.array([14, 11, 0, 0, 9, 1, 2, 0])
    return {
        "tokens": rng.integers(0, vocab_size, (8, T + 1)),
        "mask": np.argsort(rng.random((8, T)), axis=1) < counts[:, None],
    }
