"""One number of an array's bits, the same however the array lies on devices.

    fingerprint(x) = sum_i mix(bits(x)_i xor mix(i))  mod 2**32

The sum wraps, so its order does not matter. `mix` is a bijection of 32 bits in which every bit
changes half of all, so one changed word always changes the sum; other changes go unseen once in
2**32. (With the words times weights, two changed signs would cancel.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec


def fingerprints(arrays: Sequence[jax.Array]) -> list[tuple[list[int], jax.Array]]:
    """Start to compute a fingerprint of each array, where they lie.

    Args:
      arrays: of any dtype but keys (give their `key_data`), each on any devices.

    Returns:
      Places of arrays on the same devices, and the vector of their fingerprints; `numbers` reads
      them.

    Cost: one pass over the arrays, and one sum over the devices for each.
    """
    started = []
    for places in _by_devices(arrays):
        together = [arrays[i] for i in places]
        meshes = [x.sharding.mesh for x in together if isinstance(x.sharding, NamedSharding)]
        replicated = NamedSharding(meshes[0], PartitionSpec()) if meshes else None
        started.append((places, _compiled(replicated)(together)))
    return started


def numbers(started: Sequence[tuple[list[int], jax.Array]]) -> list[int]:
    """Return the fingerprints in the order of the arrays, once they are computed."""
    found = {
        place: int(number)
        for places, vector in started
        for place, number in zip(places, np.asarray(vector), strict=True)
    }
    return [found[place] for place in sorted(found)]


def _by_devices(arrays: Sequence[jax.Array]) -> list[list[int]]:
    """Returns the places of those on the same devices: one program runs on one list of them."""
    groups: dict[tuple[jax.Device, ...], list[int]] = {}
    for place, array in enumerate(arrays):
        if isinstance(array.sharding, NamedSharding):
            devices = tuple(array.sharding.mesh.devices.flat)
        else:
            devices = tuple(sorted(array.sharding.device_set, key=lambda device: device.id))
        groups.setdefault(devices, []).append(place)
    return list(groups.values())


@functools.cache
def _compiled(where: NamedSharding | None) -> Callable[[list[jax.Array]], jax.Array]:
    """Returns the function of arrays on the same devices; all of them get the result."""
    return jax.jit(lambda arrays: jnp.stack([_fingerprint(x) for x in arrays]), out_shardings=where)


def _fingerprint(x: jax.Array) -> jax.Array:
    words = _words(x)
    if not words.size:
        return jnp.uint32(0)
    position, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for axis in reversed(range(words.ndim)):
        along = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        position += along * jnp.uint32(stride % 2**32)
        stride = math.prod(words.shape[axis:])
    return jnp.sum(_mix(words ^ _mix(position)), dtype=jnp.uint32)


def _mix(x: jax.Array) -> jax.Array:
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * jnp.uint32(multiplier)
    return x ^ (x >> 16)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits as uint32, with one more axis where an element has more of them."""
    if jnp.iscomplexobj(x):
        return jnp.stack([_words(jnp.real(x)), _words(jnp.imag(x))])
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.integer):  # int4, too: widened, it keeps its value
        return x.astype(
            jnp.int32 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.uint32
        ).view(jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
