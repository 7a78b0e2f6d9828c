"""What was given at decoration, and the form of one call of it: hashable, a program's cache key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, Mesh
from optax.microbatching import AccumulationType

from gradaccum._arguments import Arguments, Selection
from gradaccum._mesh import AxisName, DataMesh, Unset
from gradaccum._reduce import accumulator_of
from gradaccum._specs import Specs


@dataclasses.dataclass(frozen=True)
class Options:
    """What was given at decoration, checked. Hashable: a part of the cache's key."""

    fun: Callable[..., Any]
    microbatches: int
    axis_name: AxisName | Unset | None
    mesh: Mesh | AbstractMesh | None
    batch: Selection
    has_aux: bool
    aux_leaves: tuple[AccumulationType, ...]
    aux_tree: Any
    loss_reduction: str
    weight_fn: Callable[..., Any] | None
    keys: Selection | Unset
    in_specs: Specs
    grad_specs: Specs
    accumulator_dtype: Any
    reduce_dtype: Any
    check_vma: bool
    fused: bool
    overlap: bool
    unroll: int
    hooks: tuple[Callable[..., Any], ...] = ()
    post_accumulate_hooks: tuple[Callable[..., Any], ...] = ()
    comm_hook: Any = None  # a frozen dataclass, or None

    def accumulator_of(self, dtype: Any) -> Any:
        """Returns the dtype that gradients of this dtype are accumulated in."""
        return accumulator_of(dtype, self.accumulator_dtype)


@dataclasses.dataclass(frozen=True)
class Call:
    """One call without its arrays: equal calls share one compiled program.

    `differentiated` says of each array leaf whether its gradient is wanted; None, in a call that
    is not differentiated. `cotangents` says that gradients become cotangents of `jax.grad`.
    """

    options: Options
    form: Arguments
    where: DataMesh
    differentiated: tuple[bool, ...] | None = None
    cotangents: bool = False
