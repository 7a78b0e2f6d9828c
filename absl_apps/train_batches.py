"""The batches of absl_apps.train on the devices, and the loss of those held out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np

from absl_apps import batches, meshes, train_program, train_start


def placed(program: train_program.Program, batch: batches.Batch) -> dict[str, jax.Array]:
    """Return this process's rows of a batch as arrays of the whole of it."""
    return {
        name: jax.make_array_from_process_local_data(x.sharding, batch[name], x.shape)
        for name, x in program.batch.items()
    }


def rows_of(program: train_program.Program) -> tuple[int, np.ndarray]:
    """Return the sequences of a call's batch, and which of them are this process's."""
    tokens = program.batch["tokens"]
    return tokens.shape[0], meshes.local_rows(tokens.sharding, tokens.shape[0])


def training(
    program: train_program.Program, start: train_start.Start, seed: int, call: int
) -> Generator[dict[str, jax.Array], None, None]:
    """Yield the batches of a run from a call on."""
    made = batches.iterate(batches.training(start.data.train, seed, *rows_of(program)), call)
    with contextlib.closing(made):
        for batch in made:
            yield placed(program, batch)


def evaluation(
    program: train_program.Program, microbatches: int, start: train_start.Start, most: int
) -> Callable[[Any], float]:
    """Return parameters -> the mean loss of the held-out data's targets, over all processes."""
    function = program.evaluation(microbatches)
    held_out = batches.evaluation(start.data.held_out, *rows_of(program), most)

    def evaluate(params: Any) -> float:
        total, count = 0.0, 0
        for batch in held_out:
            loss, targets = function(params, placed(program, batch))
            total, count = total + float(loss), count + int(targets)
        return total / count

    return evaluate
