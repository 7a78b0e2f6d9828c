"""Compressed means by hand, of one array inside a shard_map: what hooks do, without the hooks."""

import jax
import jax.flatten_util
import jax.numpy as jnp

BLOCK = 32  # numbers that share a scale


def packed(x, block=BLOCK):
    """`[..., m]` to int8 `[..., m + 4 m / block]`: numbers, then the bits of the scales."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scale = jnp.abs(blocks).max(-1, keepdims=True) / 127
    q = jnp.round(blocks / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
    bits = jax.lax.bitcast_convert_type(scale, jnp.int8)
    return jnp.concatenate([q.reshape(x.shape), bits.reshape(*x.shape[:-1], -1)], -1)


def unpacked(payload, block=BLOCK):
    count = payload.shape[-1] // (block + 4)
    q = payload[..., : count * block].reshape(*payload.shape[:-1], count, block)
    bits = payload[..., count * block :].reshape(*payload.shape[:-1], count, 4)
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
    return (q.astype(jnp.float32) * scale[..., None]).reshape(*payload.shape[:-1], -1)


def rows_summed(rows):
    return rows.sum(0)


def rows_added(rows):
    return sum(list(rows))


def int8_mean(x, axis="dp", total=rows_summed):
    """One mean of an array, int8 on the wire: exchange, sum, gather."""
    n = jax.lax.axis_size(axis)
    flat = jnp.ravel(x)
    rows = jnp.pad(flat, (0, -flat.size % (n * BLOCK))).reshape(n, -1)
    mine = jax.lax.all_to_all(packed(rows), axis, 0, 0, tiled=True)
    mean = total(unpacked(mine)) / n
    whole = jax.lax.all_gather(packed(mean), axis, tiled=True)
    return unpacked(whole.reshape(n, -1)).ravel()[: flat.size].reshape(x.shape)


def fused(mean):
    """Of a tree: all leaves laid end to end, one mean."""

    def of_tree(grads, *args, **kwargs):
        flat, unravel = jax.flatten_util.ravel_pytree(grads)
        return unravel(mean(flat, *args, **kwargs))

    return of_tree


def by_leaf(mean):
    """Of a tree: a mean for each leaf."""

    def of_tree(grads, *args, **kwargs):
        return jax.tree.map(lambda g: mean(g, *args, **kwargs), grads)

    return of_tree


def orthogonal(p):
    return jnp.linalg.qr(p)[0]


def gram_schmidt(p):
    columns = []
    for column in p.T:
        for other in columns:
            column = column - other * (other @ column)
        columns.append(column / (jnp.linalg.norm(column) + 1e-8))
    return jnp.stack(columns, 1)


def power_sgd(grads, errors, rank=2, axis="dp", orthogonalise=orthogonal):
    """Means of a tree by PowerSGD with error feedback; vectors go along whole, with P."""
    leaves, tree = jax.tree.flatten(grads)
    sent = [g + e for g, e in zip(leaves, jax.tree.leaves(errors), strict=True)]
    matrices = [m for m in sent if m.ndim == 2]
    starts = [jnp.eye(m.shape[1], rank) + 0.1 for m in matrices]
    vectors = [m for m in sent if m.ndim < 2]
    left, vectors = jax.lax.pmean(
        ([m @ q for m, q in zip(matrices, starts, strict=True)], vectors), axis
    )
    left = [orthogonalise(p) for p in left]
    right = jax.lax.pmean([m.T @ p for m, p in zip(matrices, left, strict=True)], axis)
    low = iter([p @ q.T for p, q in zip(left, right, strict=True)])
    rest = iter(vectors)
    means = [next(low) if m.ndim == 2 else next(rest) for m in sent]
    pairs = zip(sent, means, strict=True)
    kept = [m - mean if m.ndim == 2 else jnp.zeros_like(m) for m, mean in pairs]
    return tree.unflatten(means), tree.unflatten(kept)


def fp16_mean(grads, axis="dp"):
    """Scaled to the largest entry of each leaf on any device, so that no sum overflows."""
    n = jax.lax.axis_size(axis)
    top = jax.lax.pmax(jax.tree.map(lambda g: jnp.abs(g).max(), grads), axis)
    scale = jax.tree.map(lambda t: jnp.where(t > 0, t, 1) * n / 2**15, top)
    small = jax.tree.map(lambda g, s: (g / s).astype(jnp.float16), grads, scale)
    total = jax.lax.psum(small, axis)
    return jax.tree.map(lambda t, s: t.astype(jnp.float32) * s / n, total, scale)


def hsdp_mean(grads, slow="replica", fast="fsdp"):
    """In full between neighbours, each of which then exchanges its part in int8."""

    def mean(g):
        shard = jax.lax.psum_scatter(g, fast, tiled=True) / jax.lax.axis_size(fast)
        return int8_mean(shard, slow)

    return jax.tree.map(mean, grads)
