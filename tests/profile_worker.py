"""Takes profiles, in a process of its own: once libtpu has compiled in one, JAX's profiler crashes.

Makes a directory a case in the one given, with what a run leaves there, and `cases.json`.
"""

import contextlib
import json
import math
import pathlib
import sys

import jax
import numpy as np
from absl import flags

from absl_apps import (
    meshes,
    run_files,
    stopping,
    train,
    train_flags,
    train_loop,
    train_profile,
)
from absl_apps.train_state import TrainState

CASES = {  # losses, the steps to profile, and the steps of the run
    "first": ([1.0, 2.0, 3.0, 4.0, 5.0], (0, 1), 5),
    "middle": ([1.0, 2.0, 3.0, 4.0, 5.0], (2, 4), 5),
    "last": ([1.0, 2.0, 3.0, 4.0, 5.0], (3, 5), 5),
    "cut short": ([1.0, 2.0, math.nan, 4.0, 5.0], (1, 5), 5),
    "failing": ([1.0, 2.0], (1, 4), 5),
}
TINY = ("--d_model=16", "--n_layer=1", "--n_head=2", "--seq_len=16", "--steps=3")
BATCH = ("--global_batch=16", "--microbatches=2")


def take(directory, losses, profiled, steps):
    """Takes steps that compute next to nothing; returns their losses, or the error."""
    outputs = run_files.RunFiles(str(directory))
    loop = train_loop.Loop(
        step=lambda state, batch, call: (state, {"loss": losses[batch], "gradient_norm": 1.0}),
        batches=lambda call: (x for x in range(call, steps)),
        evaluate=None,
        steps=steps,
        every_k=1,
        eval_every=0,
        checkpoint_every=0,
        skips=False,
        rates=np.ones(steps),
        tokens=1,
        outputs=outputs,
        checkpoints=None,
        signals=stopping.Signals(),
        profile=train_profile.Profile(outputs.profile_path, range(*profiled), ["here"]),
        facts={},
        saved=None,
    )
    try:
        loop.run(TrainState({}, ()), train_loop.Progress())
        return [line["loss"] for line in outputs.lines()]
    except (SystemExit, IndexError) as error:
        return str(error)
    finally:
        outputs.close()
        with jax.profiler.trace(directory / "another"):  # JAX refuses it while one is open
            pass


def main(directory):
    meshes.prepare_platform(8)
    directory = pathlib.Path(directory)
    found = {name: take(directory / name, *case) for name, case in CASES.items()}
    (directory / "cases.json").write_text(json.dumps(found))
    text = directory / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    files = f"--data={text}", f"--workdir={directory / 'a run'}"
    values = flags.FlagValues()
    train_flags.parse(["train", *TINY, *BATCH, *files, "--profile_steps=1:3"], values, manual="")
    with open(directory / "printed", "w") as out, contextlib.redirect_stdout(out):
        train.train(values)


if __name__ == "__main__":
    main(sys.argv[1])
