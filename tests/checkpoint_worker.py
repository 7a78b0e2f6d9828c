"""A process that makes checkpoints: to be killed, to meet a full disk, or one of several."""

import argparse
import json
import pathlib
import resource
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import checkpoints, cluster, meshes


def mesh_of(**axes):
    devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
    return jax.sharding.Mesh(devices.reshape(*axes.values()), tuple(axes))


def state_at(call, mesh, rows=16, width=4):
    """Returns a state that is another at every call, made where it lies."""
    axis = mesh.axis_names[0]
    where = {"w": P(axis), "b": P(), "key": P(), "n": P(), "odd": P(None, axis)}

    def make(call):
        x = jnp.arange(rows * width, dtype=jnp.float32).reshape(rows, width)
        return {
            "w": x + call,
            "b": (jnp.arange(3.0) * call).astype(jnp.bfloat16),
            "key": jax.random.fold_in(jax.random.key(7), call),
            "n": call,
            "odd": x[:3].repeat(4, axis=1) - call,
        }

    shardings = {name: NamedSharding(mesh, spec) for name, spec in where.items()}
    return jax.jit(make, out_shardings=shardings)(jnp.int32(call))


def bits(tree):
    """Returns what of a tree of arrays is on this process's devices, as bytes."""
    words = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )
    return [
        [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]
        for x in jax.tree.leaves(words)
    ]


def save_for_ever(directory):
    mesh = mesh_of(dp=2)
    made = checkpoints.Checkpoints(directory, keep=2)
    first = (made.latest() or 0) + 1
    for call in range(first, 10**6):
        made.save(call, state_at(call, mesh, width=2**16), {"call": call})


def save_and_restore(directory):
    """Prints nothing; the last act is to say when it ended."""
    assert not any(name.partition(".")[0] == "orbax" for name in sys.modules), "not at import"
    mesh = mesh_of(dp=2)
    with checkpoints.Checkpoints(directory, keep=1) as made:
        for call in 1, 2:
            made.save(call, state_at(call, mesh), {})
        restored = made.restore(2, state_at(0, mesh)) if made.wait() is None else None
    assert bits(restored) == bits(state_at(2, mesh))
    pathlib.Path(directory, "ended").write_text(str(time.time()))


def meet_the_limit(directory, limit):
    """Saves small states, then one that is larger than files may be; prints how it ended."""
    mesh = mesh_of(dp=2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    made = checkpoints.Checkpoints(directory, keep=3)
    for call in 1, 2:
        made.save(call, state_at(call, mesh), {})
    made.wait()
    seen = []
    for act in ("wait", "save"):  # the error is told by either
        try:
            made.save(3, state_at(3, mesh, width=2**18), {})
            made.wait() if act == "wait" else made.save(4, state_at(4, mesh), {})
            seen.append("nothing")
        except ValueError as error:
            seen.append(str(error))
    made.save(5, state_at(5, mesh), {})  # there is room again
    made.close()
    print(json.dumps(seen))


def be_one_of_two(directory, index, address, limit):
    """Restores what one process saved, saves anew, restores that; each checks its own part."""
    join(index, address)
    mesh = mesh_of(dp=2, mp=2)
    with checkpoints.Checkpoints(directory, keep=2) as made:
        restored = made.restore(5, state_at(0, mesh))
        assert bits(restored) == bits(state_at(5, mesh))
        with pytest.raises(ValueError, match=r"\['w'\] is float32\[16, 4\], needed float32\[16, 8"):
            made.restore(5, state_at(0, mesh, width=8))
        for call in 6, 7:
            made.save(call, state_at(call, mesh), {"call": call})
        made.wait()
        assert bits(made.restore(7, state_at(0, mesh))) == bits(state_at(7, mesh))
        if limit:
            with cluster.ending_together():
                if index == 1:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
                made.save(8, state_at(8, mesh, width=2**18), {})
                try:
                    made.wait()
                except ValueError as error:
                    sys.exit(f"worker: {error}")


def join(index, address):
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, index, heartbeat_timeout_seconds=5)
    cluster.exchange("joined")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("act")
    parser.add_argument("directory")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--index", type=int)
    parser.add_argument("--address")
    given = parser.parse_args()
    meshes.prepare_platform(2)
    acts = {
        "kill": lambda: save_for_ever(given.directory),
        "quiet": lambda: save_and_restore(given.directory),
        "limit": lambda: meet_the_limit(given.directory, given.limit),
        "two": lambda: be_one_of_two(given.directory, given.index, given.address, given.limit),
    }
    acts[given.act]()
