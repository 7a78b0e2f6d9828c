"""What a step of absl_apps.train is made of, and the optax transformations that it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

import gradaccum
from absl_apps import layers, meshes, transformer
from absl_apps.meshes import MODEL_AXIS


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a step is made of, but for its number of microbatches.

    Attributes:
      config: the model.
      mesh: the devices, here or not.
      base: the optimizer of a mean gradient.
      zero: the ZeRO stage, what is split over the last data axis; 0: nothing, 1: the optimizer's
        state, 2: gradients too, 3: parameters too.
      sequence_parallel: whether activations between layers are split over the model axis.
      every_k: calls a step.
      comm_hook: what takes the mean; None: an all-reduce, or a reduce-scatter.
      reduce_dtype: of gradients on the wire; None: float32.
    """

    config: transformer.Config
    mesh: jax.sharding.Mesh
    base: optax.GradientTransformation
    zero: int = 0
    sequence_parallel: bool = False
    every_k: int = 1
    comm_hook: Any = None
    reduce_dtype: str | None = None

    @property
    def data_axes(self) -> tuple[str, ...]:
        return meshes.data_axes(self.mesh)

    @property
    def unreduced(self) -> bool:
        """Whether the mean is taken after the loss: by a hook, or once a window."""
        return self.every_k > 1 or self.comm_hook is not None

    @property
    def layers(self) -> layers.Layers:
        if MODEL_AXIS not in self.mesh.shape:
            return layers.PLAIN
        return layers.sharded(MODEL_AXIS, self.sequence_parallel)

    def specs(self, stage: int) -> transformer.Params:
        """Return the specs of moments (stage 1), gradients (2) or parameters (3)."""
        model = transformer.specs(MODEL_AXIS if MODEL_AXIS in self.mesh.shape else None)
        if self.zero < stage:
            return model
        return jax.tree.map(
            lambda x, spec: meshes.split_spec(x.shape, self.mesh, spec), self.param_shapes(), model
        )

    def param_shapes(self) -> transformer.Params:
        return jax.eval_shape(lambda: transformer.init(jax.random.key(0), self.config))

    def placed(self, specs: Any) -> Any:
        """Return shardings on the mesh."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    ##################################### Transformations ######################################

    def optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer of a mean gradient, which computes where its moments lie.

        With ZeRO, updates are what is gathered: then parameters are updated in place.
        """
        return optax.chain(
            _laid_out(self.placed(self.specs(1))),
            self.base,
            _laid_out(self.placed(self.specs(3))),
        )

    def window(self, is_bad: Callable[..., Any] | None = None) -> gradaccum.MultiSteps:
        """Return the optimizer of unreduced gradients that come call by call.

        Args:
          is_bad: the mean gradient's norm, float32 `[]` -> whether to drop the window.
        """

        def skip(grads: Any, *_: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
            norm = optax.tree.norm(grads)
            bad = jnp.zeros((), bool) if is_bad is None else is_bad(norm)
            return bad, {"gradient_norm": norm}

        return gradaccum.MultiSteps(
            self.optimizer(),
            self.every_k,
            should_skip_update_fn=skip,
            axis_name=self.data_axes,
            mesh=self.mesh,
            comm_hook=self.comm_hook,
        )

    def loss_window(self) -> gradaccum.MultiSteps:
        """Return what makes the losses of a window's calls one: of it, a mean like the gradient."""
        return gradaccum.MultiSteps(
            optax.identity(), self.every_k, axis_name=self.data_axes, mesh=self.mesh
        )

    def hook_mean(self) -> optax.GradientTransformation:
        """Return the hook as a transformation of unreduced gradients to their mean."""
        return gradaccum.all_reduce_mean(self.data_axes, mesh=self.mesh, comm_hook=self.comm_hook)


def _laid_out(where: Any) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, _: jax.lax.with_sharding_constraint(updates, where))
