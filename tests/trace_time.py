"""How long a decorated loss takes to trace, in terms of the undecorated one.

python -m tests.trace_time --layers=24 [--scan]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

import gradaccum

WIDTH, ROWS = 16, 64


def layer(x: jax.Array, p: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
    w, b, scale = p
    normed = x * scale / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return x + jax.nn.gelu(normed @ w + b), None


def written_out(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for p in params:
        x, _ = layer(x, p)
    return jnp.mean((x - y) ** 2)


def scanned(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    # A body of its own in each trace, as models have: of one that it has seen JAX keeps the trace.
    x, _ = jax.lax.scan(lambda *args: layer(*args), x, params)
    return jnp.mean((x - y) ** 2)


def seconds(loss: Callable[..., jax.Array], args: tuple[Any, ...], depth: int) -> float:
    """Traces value and gradient once, `depth` Python frames deeper than here."""
    if depth:
        return seconds(loss, args, depth - 1)
    started = time.perf_counter()
    jax.make_jaxpr(lambda *args: jax.value_and_grad(loss)(*args))(*args)
    return time.perf_counter() - started


def main(argv: list[str]) -> None:
    if argv[1:]:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    layers = flags.FLAGS.layers
    one = jnp.zeros((WIDTH, WIDTH)), jnp.zeros(WIDTH), jnp.ones(WIDTH)
    loss, params = written_out, [one] * layers
    if flags.FLAGS.scan:
        loss, params = scanned, jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    args = params, jnp.ones((ROWS, WIDTH)), jnp.ones((ROWS, WIDTH))
    mesh = jax.make_mesh((1,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    decorated = gradaccum.accumulate(loss, microbatches=4, mesh=mesh, batch_argnums=(1, 2))
    found: dict[Any, list[float]] = {loss: [], decorated: []}
    # CPython up to 3.13 maps and unmaps memory at each call where a chunk of its stack ends: a loop
    # at such a depth takes two to four times as long. So at many depths, interleaved.
    for depth in [0, *range(0, 120, 4)]:
        for fun, times in found.items():
            times.append(seconds(fun, args, depth))
    plain, ours = (times[1:] for times in found.values())  # the first compiles helpers
    for name, times in ("undecorated", plain), ("decorated", ours):
        low, middle, high = (1e3 * t for t in statistics.quantiles(times, n=4))
        print(f"{name}: {middle:.1f} ms (quartiles {low:.1f} to {high:.1f})")
    print(f"ratio of the medians: {statistics.median(ours) / statistics.median(plain):.2f}")


if __name__ == "__main__":
    flags.DEFINE_integer("layers", 24, "Equal layers of the model.", lower_bound=1)
    flags.DEFINE_boolean("scan", False, "Scan the layers; else they are written out in Python.")
    app.run(main)
