"""The rules of tensor parallelism, broken one at a time, to see what each one keeps right.

`gradaccum.accumulate` refuses a loss that breaks one, so the broken models run by hand, in a plain
`jax.shard_map` whose types are not checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from absl_apps.layers import Layers
from absl_apps.meshes import DATA_AXIS
from absl_apps.tensor_parallel_models import MODEL_AXIS, Model
from gradaccum import tensor_parallel


@dataclasses.dataclass(frozen=True)
class Rule:
    """A rule that can be broken.

    Attributes:
      broken: (a model's layers, its sequence axis) -> layers that break the rule.
      lesson: what the operator is for, and what goes wrong without it.
      needs_bias: whether it is about a bias after row-sharded weights.
    """

    broken: Callable[[Layers, int | None], Layers]
    lesson: str
    needs_bias: bool = False


def _no_f(layers: Layers, sequence_axis: int | None) -> Layers:
    def column_dense(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
        if sequence_axis is not None:  # gathered, but nothing sums its cotangents
            x = tensor_parallel.gather_from(x, MODEL_AXIS, sequence_axis)
        return _add_bias(x @ w, b)

    return dataclasses.replace(layers, column_dense=column_dense)


def _bias_before_sum(layers: Layers, sequence_axis: int | None) -> Layers:
    del sequence_axis  # the one model with a bias has none

    def row_dense(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
        return tensor_parallel.reduce_from(_add_bias(x @ w, b), MODEL_AXIS)

    return dataclasses.replace(layers, row_dense=row_dense)


def _plain_psum(layers: Layers, sequence_axis: int | None) -> Layers:
    def row_dense(x: jax.Array, w: jax.Array, b: jax.Array | None) -> jax.Array:
        y = jax.lax.psum(x @ w, MODEL_AXIS)
        if sequence_axis is not None:
            y = tensor_parallel.scatter_to(y, MODEL_AXIS, sequence_axis)
        return _add_bias(y, b)

    return dataclasses.replace(layers, row_dense=row_dense)


def _add_bias(y: jax.Array, b: jax.Array | None) -> jax.Array:
    return y if b is None else y + jnp.expand_dims(b, range(y.ndim - 1))


RULES = {
    "no_f": Rule(
        _no_f,
        "f (copy_to; all_gather_to under sequence parallelism) sums, backward, what each device's "
        "columns add to the gradient of their common input. Without it a device keeps its own part "
        "only: all that lies before the columns is wrong, and copies of a replicated leaf differ.",
    ),
    "bias_before_sum": Rule(
        _bias_before_sum,
        "The bias of a row-sharded layer belongs after g. Before it every device adds the whole "
        "bias, so the sum holds it once for each device: the loss itself is wrong, and every "
        "gradient with it. Biases that start at zero hide it until the first update.",
        needs_bias=True,
    ),
    "plain_psum": Rule(
        _plain_psum,
        "g (reduce_from; reduce_scatter_from under sequence parallelism) sums the devices' parts, "
        "and hands the cotangent on as it is: what follows is computed alike on every device and "
        "counts once. jax.lax.psum's transpose, where types are not checked, sums those equal "
        "cotangents: the loss is right, and the weights before it get a gradient too large by the "
        "number of devices, those of earlier layers by more than one such factor mixed.",
    ),
}


def by_hand(model: Model, layers: Layers, mesh: jax.sharding.Mesh) -> Callable[..., Any]:
    """Return (params, tokens) -> (loss, grads) of the whole batch, with nothing checked."""

    def step(params: Any, tokens: jax.Array) -> Any:
        values = jax.value_and_grad(model.loss)(params, tokens, layers)
        return jax.lax.pmean(values, DATA_AXIS)

    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(model.specs, P(DATA_AXIS)),
        out_specs=(P(), model.specs),
        check_vma=False,
    )
