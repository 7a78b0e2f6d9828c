"""Small training steps to audit: a two-layer net on meshes of CPU devices."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

D = 16
TREE = 4 * 2 * (D * D + D)  # bytes of the gradient tree


def mesh_of(**axes):
    names, sizes = tuple(axes), tuple(axes.values())
    return jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def shaped(shape, mesh, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def loss(params, x):
    for w, b in params:
        x = x + jnp.tanh(x @ w + b[None])
    return jnp.mean(x**2)


GRAD = jax.grad(loss)


def compiled(f, *args):
    """Compile for what matters here: the collectives, not the speed of the code."""
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(f).lower(*args).compile(compiler_options=fast)


def arguments(mesh, *batch_spec, rows=64):
    """Parameters, replicated, and a batch: `[rows, D]`, or `[4, rows, D]` for a longer spec."""
    params = [(shaped((D, D), mesh), shaped((D,), mesh)) for _ in range(2)]
    shape = (rows, D) if len(batch_spec) == 1 else (4, rows, D)
    return params, shaped(shape, mesh, *batch_spec)


def program(step, mesh, *batch_spec, rows=64, out=None):
    """Compile a shard_map of `step(params, x)`; the batch is split over dp unless told."""
    batch_spec = batch_spec or ("dp",)
    specs = P(), P(*batch_spec)
    f = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=out or P(), check_vma=False)
    return compiled(f, *arguments(mesh, *batch_spec, rows=rows))


def every_kind(x):
    """Each kind of collective over dp, 8 rows of D a device."""
    return (
        jax.lax.psum(x, "dp"),
        jax.lax.psum_scatter(x * 2, "dp", tiled=True),
        jax.lax.all_gather(x * 3, "dp", tiled=True),
        jax.lax.all_to_all(x * 4, "dp", 0, 0, tiled=True),
        jax.lax.ppermute(x * 5, "dp", [(i, (i + 1) % 4) for i in range(4)]),
    )


def every_kind_program(mesh):
    f = jax.shard_map(every_kind, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)
    return compiled(f, shaped((32, D), mesh, "dp"))
