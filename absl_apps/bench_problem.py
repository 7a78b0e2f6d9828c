"""What absl_apps.bench compares: a problem on a mesh, and the contenders that solve it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import meshes

OURS = "gradaccum"  # ratios and differences are to the contender of this name


@dataclasses.dataclass(frozen=True)
class Problem:
    """The first seed's problem on a mesh; the names of its sizes are the seed's flags."""

    mesh: Mesh
    grad_acc_steps: int  # k
    batch_size: int  # B
    d_model: int  # D
    n_layer: int  # L
    dtype: Any  # of parameters and batch in the loss, so of gradients, accumulator and wire
    donate: bool = False  # the parameters (and the state of k calls), to the program

    unit: ClassVar[str] = "step"  # what one time is of

    @property
    def title(self) -> str:
        return (
            f"{self.n_layer} layers of {self.d_model}, batch {self.batch_size} in "
            f"{self.grad_acc_steps} microbatches, {self.dtype}"
        )

    @property
    def axes(self) -> tuple[str, ...]:
        return self.mesh.axis_names

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, P())

    @property
    def split(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(self.axes))

    @property
    def params_shape(self) -> Any:
        shape = (self.n_layer, self.d_model, self.d_model)
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.replicated)

    @property
    def params_split(self) -> P:
        return meshes.split_spec(self.params_shape.shape, self.mesh)

    def batch_shape(self, rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, self.d_model), jnp.float32, sharding=self.split)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient tree, on each device."""
        return sum(x.size for x in jax.tree.leaves(self.params_shape)) * self.dtype.itemsize

    def arrays(self, seed: int) -> tuple[Any, jax.Array]:
        """Draw params and batch [B, D], in place on the mesh.

        The seed's batch is all ones; these rows differ, or a step that lost some would go
        unnoticed. Weights are of order 1/sqrt(fan in), so that activations stay in range.
        """

        def draw(key: jax.Array) -> tuple[Any, jax.Array]:
            shapes, treedef = jax.tree.flatten(self.params_shape)
            for_batch, *keys = jax.random.split(key, 1 + len(shapes))
            params = [
                jax.random.normal(key, x.shape) / x.shape[-2] ** 0.5
                for key, x in zip(keys, shapes, strict=True)
            ]
            batch = 1 + jax.random.normal(for_batch, (self.batch_size, self.d_model))
            return treedef.unflatten(params), batch

        # Drawn on each device: the same bits, and no program moves them about.
        draw = jax.jit(draw, out_shardings=(self.replicated, self.split))
        return draw(jax.random.key(seed))

    def cast(self, *arrays: Any) -> tuple[Any, ...]:
        """The seed's `to_bf16`, before the loop, so that gradients have this dtype too.

        Given a float32 batch, as in the seed, each layer's gradient is a float32 product that XLA
        reduces before it rounds: twice the bytes. So the steps cast the batch as well.
        """
        return jax.tree.map(lambda x: x.astype(self.dtype), arrays)


class Contender(NamedTuple):
    """One way to write the step, before compilation.

    Attributes:
      jitted: the program to compile.
      shapes: its arguments, with shardings.
      gradients: of the same arguments, the step's loss and gradients alone, if it has them.
      run: (compiled program, params, batches) -> (new params, loss). This is what is timed.
      prepare: (params, batch) -> (params, batches) where the program wants them, not timed.
      read_loss: the loss that `run` returned -> a number, to be compared, not timed.
      calls: how often a step calls the program.
      state_bytes: bytes that each device holds from call to call besides the parameters.
      ours: it promises one cross-device mean. In k calls this stands in a branch, taken once.
      tolerance: largest relative difference to gradaccum's values; None: that of the dtype.
    """

    jitted: Any
    shapes: tuple[Any, ...]
    gradients: Any = None
    run: Callable[[Any, jax.Array, Any], tuple[jax.Array, jax.Array]] = (
        lambda program, params, batch: program(params, batch)
    )
    prepare: Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]] = lambda *arrays: arrays
    read_loss: Callable[[Any], Any] = lambda loss: loss
    calls: int = 1
    state_bytes: int = 0
    ours: bool = False
    tolerance: float | None = None
