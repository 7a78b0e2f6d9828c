"""Small runs of absl_apps.tensor_parallel, for its tests."""

import json

import jax
import numpy as np
import pytest
from absl import flags

from absl_apps import tensor_parallel, tensor_parallel_flags

TINY = (
    "--d_model=8",
    "--n_layer=2",
    "--n_head=4",
    "--seq_len=4",
    "--batch_size=8",
    "--microbatches=2",
)


def parse(*args):
    values = flags.FlagValues()
    tensor_parallel_flags.parse(["tensor_parallel", *args], values, manual="The manual.")
    return values


def run(*args):
    return tensor_parallel.run(parse(*TINY, *args))


def run_json(path, *args):
    """Return the failures, and what --json holds."""
    failures = run(*args, f"--json={path}")
    return failures, json.loads(path.read_text())


def run_printed(path, *args):
    """Return the failures, what --json holds, and what was printed; for fixtures of a module."""
    lines = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda *args, **_: lines.append(" ".join(args)))
        return *run_json(path, *args), "\n".join(lines)


def remembering(unsharded):
    """Return `unsharded` that compiles once for the same parameters and tokens: it costs most."""

    def remembered(model, key, batch):
        shapes, *arrays = str(jax.eval_shape(model.init, key)), jax.random.key_data(key), batch
        asked = (shapes, *(np.asarray(x).tobytes() for x in arrays))
        if asked not in known:
            known[asked] = unsharded(model, key, batch)
        return known[asked]

    known = {}
    return remembered
