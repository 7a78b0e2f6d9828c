"""One of several processes: joins, and writes what it sees into a file of JSON."""

import json
import os
import pathlib
import signal
import time

import jax
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import cluster, meshes

BATCH, LENGTH = 16, 5
EVERYTHING = np.arange(BATCH * LENGTH, dtype=np.uint8).reshape(BATCH, LENGTH)

# Axes, and the order of the devices, 0 to 3 of process 0 and 4 to 7 of process 1.
MESHES = {
    "data": ({"dp": 8}, range(8)),
    "data, shuffled": ({"dp": 8}, [3, 0, 6, 1, 5, 2, 7, 4]),
    "replicas": ({"replica": 2, "dp": 4}, range(8)),
    "model in a process": ({"dp": 4, "mp": 2}, range(8)),
    "model over processes": ({"dp": 4, "mp": 2}, [0, 4, 1, 5, 2, 6, 3, 7]),
    "model alone": ({"dp": 1, "mp": 8}, range(8)),
    "braided": ({"dp": 4, "mp": 2}, [0, 1, 2, 4, 3, 5, 6, 7]),  # rows shared in part
}


def rows_of(axes, order):
    """Returns this process's rows, after the global array made of them was found to be right."""
    mesh = meshes.make(axes, "")
    devices = mesh.devices.reshape(-1)[list(order)].reshape(mesh.devices.shape)
    mesh = jax.sharding.Mesh(devices, mesh.axis_names)
    split = NamedSharding(mesh, P(meshes.data_axes(mesh)))
    rows = meshes.local_rows(split, BATCH)
    shape = BATCH, LENGTH
    tokens = jax.make_array_from_process_local_data(split, EVERYTHING[rows], shape)
    assert tokens.shape == shape
    for shard in tokens.addressable_shards:
        np.testing.assert_array_equal(shard.data, EVERYTHING[shard.index])
    return rows.tolist()


def message(check):
    try:
        check()
    except ValueError as error:
        return str(error)


def failing(index):
    with cluster.failing_together():
        if jax.process_index() == index:
            raise FileNotFoundError(2, "No such file", "there")


def main(argv):
    meshes.prepare_platform(flags.FLAGS.devices)
    cluster.join("worker", flags.FLAGS)
    index = jax.process_index()
    seen = {
        "devices": jax.device_count(),
        "rows": {name: rows_of(*mesh) for name, mesh in MESHES.items()},
        "exchanged": cluster.exchange("né" * index),
        "nothing": cluster.exchange(""),
        "idle": message(lambda: meshes.make({"dp": 4}, "--mesh=dp=4")),
        "failed": [message(lambda i=i: failing(i)) for i in (0, 1, 9)],
        "differ": message(lambda: cluster.agree({"a": 1, "b": index, "c": [index], "_d": index})),
        "agreed": cluster.agree({"a": 1, "_d": index}),
    }
    pathlib.Path(argv[1]).write_text(json.dumps(seen))
    cluster.exchange("written")
    if index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(2)
    os._exit(0)


if __name__ == "__main__":
    cluster.define(flags.FLAGS)
    flags.DEFINE_integer("devices", 4, "CPU devices of this process.")
    app.run(main)
