"""What the tests of sharded parameters share: one model, meshes, and its layouts on them."""

import dataclasses
import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

B, D, H, V = 32, 8, 16, 8
WITHIN = 2e-5  # of the largest entry of a leaf, float32

MESHES = {
    "dp": {"dp": 8},
    "replica-fsdp": {"replica": 2, "fsdp": 4},
    "dp-mp": {"dp": 4, "mp": 2},
    "fsdp-mp": {"fsdp": 4, "mp": 2},
}


def mesh_of(sizes, kind=AxisType.Auto):
    """Returns a mesh of these axes, all of one type."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    kinds = (kind,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, devices=devices)


# --- The model: a stack of layers, Megatron's two matrices, a table used twice, a bias, a scalar --


def losses(p, batch, f=lambda x: x, g=lambda x: x):
    """Returns one loss an example; f and g stand where tensor-parallel computation begins, ends."""
    h = batch["x"] + p["table"][batch["ids"]]
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["stack"])
    y = g(jnp.tanh(f(h) @ p["up"]) @ p["down"])
    logits = p["scale"] * (y @ p["table"].T) + p["bias"][None]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1)[:, 0]


def loss_of(reduction="mean", **operators):
    """Returns the loss function: the 'mean', the 'sum', or the mean of masked 'tokens'."""

    def loss_fn(params, batch):
        each = losses(params, batch, **operators)
        if reduction == "tokens":
            return jnp.sum(batch["mask"] * each) / jnp.sum(batch["mask"])
        return jnp.mean(each) if reduction == "mean" else jnp.sum(each)

    return loss_fn


def init(dtype=np.float32):
    shapes = {
        "stack": (2, D, D),
        "up": (D, H),
        "down": (H, D),
        "table": (V, D),
        "bias": (V,),
        "scale": (),
    }
    return {n: (helpers.normal(i, *s) / 2).astype(dtype) for i, (n, s) in enumerate(shapes.items())}


def make_batch():
    """Returns B rows, of which the mask keeps an unequal number on each device, and none on one."""
    rng = np.random.default_rng(7)
    mask = rng.integers(0, 2, B)
    mask[:4] = 0
    return {
        "x": helpers.normal(5, B, D).astype(np.float32),
        "ids": rng.integers(0, V, B, dtype=np.int32),
        "y": rng.integers(0, V, B, dtype=np.int32),
        "mask": mask.astype(np.float32),
    }


# --- A pair of matrices, where that is enough -----------------------------------------------------


def pair_loss(p, batch, f=lambda x: x, g=lambda x: x):
    h = jnp.tanh(f(batch["x"]) @ p["up"])
    y = g(h @ p["down"]) + p["bias"][None]
    return jnp.mean(jnp.sum(jnp.sin(y) * batch["y"], axis=1))


def init_pair(dtype=np.float32):
    shapes = {"up": (D, H), "down": (H, D), "bias": (D,)}
    return {n: (helpers.normal(i, *s) / 2).astype(dtype) for i, (n, s) in enumerate(shapes.items())}


def pair_batch():
    return {n: helpers.normal(i, B, D).astype(np.float32) for i, n in enumerate("xy", 7)}


# --- Layouts -------------------------------------------------------------------------------------


def specs_of(data=None, model=None, together=False):
    """Returns the model's specs: each matrix split over `data` and over `model`.

    Args:
      data: the axis or axes of one dimension, or None.
      model: the model axis of `up` and `down`, or None.
      together: put both on one dimension, the model axis first.
    """
    both = (model, *((data,) if isinstance(data, str) else data or ()))
    return {
        "stack": P(None, data),
        "up": P(None, both) if together else P(data, model),
        "down": P(both) if together else P(model, data),
        "table": P(data),
        "bias": P(),
        "scale": P(),
    }


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the model lies: parameters over `params`, gradients over `grads` of the data axes.

    `model` says what a model axis is: "auto" (known to the loss alone), "named" (automatic, and
    named in grad_specs), "manual" (by the operators of tensor_parallel) or "typed" (by raw psum,
    with check_vma=True).
    """

    mesh: str
    params: str | tuple[str, ...] | None = None
    grads: str | tuple[str, ...] | None = None
    model: str | None = None
    together: bool = False

    @property
    def data(self):
        return tuple(a for a in MESHES[self.mesh] if a != "mp")

    @property
    def devices(self):
        return math.prod(MESHES[self.mesh][a] for a in self.data)

    @property
    def manual(self):
        return self.model in ("manual", "typed")

    def _specs(self, data, named):
        return specs_of(data, "mp" if named else None, self.together)

    def placed(self, grads=False):
        """Returns the specs as the arrays lie, model axes included."""
        return self._specs(self.grads if grads else self.params, self.model)

    def options(self):
        """Returns what `accumulate` is given for this layout; specs only where there are any."""
        given = {"axis_name": self.data if len(self.data) > 1 else self.data[0]}
        if self.params or self.manual:
            given["in_specs"] = (self._specs(self.params, self.manual),)
        if self.grads != self.params or self.model == "named":
            given["grad_specs"] = (self._specs(self.grads, self.manual or self.model == "named"),)
        if self.model == "typed":
            given["check_vma"] = True
        return given

    def operators(self):
        """Returns f and g of the loss."""
        if self.model == "manual":
            from gradaccum.tensor_parallel import copy_to, reduce_from

            return {"f": lambda x: copy_to(x, "mp"), "g": lambda x: reduce_from(x, "mp")}
        return {"g": lambda x: jax.lax.psum(x, "mp")} if self.model == "typed" else {}


BOTH = ("replica", "fsdp")
MODEL = ("auto", "named", "manual", "typed")
LAYOUTS = {
    "replicated": Layout("dp"),
    "zero": Layout("dp", None, "dp"),
    "fsdp": Layout("dp", "dp", "dp"),
    "hsdp-replicated": Layout("replica-fsdp"),
    "hsdp-zero": Layout("replica-fsdp", None, "fsdp"),
    "hsdp": Layout("replica-fsdp", "fsdp", "fsdp"),
    "fsdp-over-both": Layout("replica-fsdp", BOTH, BOTH),
    "hsdp-gradients-over-both": Layout("replica-fsdp", "fsdp", BOTH[::-1]),
    "auto-replicated": Layout("dp-mp", None, None, "auto"),
    "manual-replicated": Layout("dp-mp", None, None, "manual"),
    **{f"{m}-zero": Layout("dp-mp", None, "dp", m) for m in MODEL},
    **{f"{m}-fsdp": Layout("fsdp-mp", "fsdp", "fsdp", m) for m in MODEL},
    "manual-fsdp-together": Layout("fsdp-mp", "fsdp", "fsdp", "manual", together=True),
    "typed-fsdp-together": Layout("fsdp-mp", "fsdp", "fsdp", "typed", together=True),
}


def place(tree, mesh, specs):
    """Puts each array where its spec says."""
    return jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), tree, specs)


def shapes(tree, mesh, specs):
    """Returns the shapes of arrays that would lie there."""
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s)),
        tree,
        specs,
    )


def constrain(tree, mesh, specs):
    """The same inside jit, on both types of axes."""
    explicit = mesh.axis_types[0] == AxisType.Explicit
    to = jax.sharding.reshard if explicit else jax.lax.with_sharding_constraint
    return jax.tree.map(lambda x, s: to(x, NamedSharding(mesh, s)), tree, specs)


def assert_lies(tree, mesh, specs):
    """Asserts that each array lies as its spec says."""
    for (path, x), spec in zip(
        jax.tree_util.tree_leaves_with_path(tree), jax.tree.leaves(specs), strict=True
    ):
        want = NamedSharding(mesh, spec)
        assert x.sharding.is_equivalent_to(want, x.ndim), (
            f"{jax.tree_util.keystr(path)}: {x.sharding.spec}, not {spec}"
        )


jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)


def in_float64(fun, *args):
    """Returns fun of these very values, computed unsharded in float64."""
    with jax.enable_x64(True):
        wide = lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, np.floating) else x  # noqa: E731
        args = jax.tree.map(lambda x: wide(np.asarray(x)), args)
        return jax.device_get(jit(fun)(*args))
