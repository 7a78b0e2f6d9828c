"""Dropout of the training program: which masks there are, what they do, where there are none."""

import helpers
import jax
import numpy as np
import pytest
from train_plain import Stepper, T, exact, unequal

from absl_apps import transformer

DROPOUT = 0.25
ONE_ROW = np.eye(8, dtype=bool)


def rows_alone():
    """Eight batches of eight equal rows, of which one row's targets count."""
    tokens = np.tile(np.random.default_rng(2).integers(0, 300, T + 1), (8, 1))
    return [{"tokens": tokens, "mask": np.repeat(row[:, None], T, axis=1)} for row in ONE_ROW]


def loss_of(stepper, *calls, **which):
    return float(stepper(*calls, **which)[0]["loss"])


@pytest.fixture(scope="module")
def dropped():
    return Stepper("--vocab_size=300", f"--dropout={DROPOUT}")


def test_every_row_call_and_seed_has_a_mask_of_its_own(dropped):
    """Rows of two devices and two microbatches of each; the loss of a row is its mask's."""
    rows = rows_alone()
    found = [loss_of(dropped, row) for row in rows]
    assert len(set(found)) == 8
    plain_loss = exact(dropped.params, rows[0], 300)[0][0]
    assert all(1e-3 < abs(loss - plain_loss) < 1 for loss in found)
    assert loss_of(dropped, rows[3]) == found[3]
    others = loss_of(dropped, rows[3], first=1), loss_of(dropped, rows[3], seed=1)
    assert len({found[3], *others}) == 3


def test_masks_do_not_depend_on_model_devices(dropped):
    batch = unequal()
    args = "--mesh=dp=2,mp=2", "--sequence_parallel", "--vocab_size=300", f"--dropout={DROPOUT}"
    helpers.assert_close(Stepper(*args)(batch), dropped(batch), within=1e-4)


def test_calls_of_a_window_have_masks_of_their_own():
    """Of two calls, one has a row with targets, and the other has none."""
    stepper = Stepper("--vocab_size=300", f"--dropout={DROPOUT}", "--every_k=2")
    row, none = ({name: x[:4] for name, x in rows_alone()[i].items()} for i in (0, 7))
    calls = (row, none), (none, row)
    found = [loss_of(stepper, *pair, first=first) for pair in calls for first in (0, 2)]
    assert len(set(found)) == 4
    assert loss_of(stepper, row, none) == found[0]


def test_an_evaluation_drops_nothing(dropped):
    batch, program = unequal(), dropped.program
    batch["tokens"] = batch["tokens"].astype(np.uint16)
    placed = jax.device_put(batch, {name: x.sharding for name, x in program.batch.items()})
    total, count = program.evaluation(2)(dropped.params, placed)
    (loss, targets), _ = exact(dropped.params, batch, 300)
    assert (int(count), float(total)) == (targets, pytest.approx(targets * loss, rel=1e-5))


def test_that_part_is_dropped_and_the_rest_is_scaled():
    """Of attention that writes to half of the stream, whose other half keeps what it was."""
    D, shape = 16, (64, T)
    config = transformer.Config(D, 1, 2, "float32", dropout=DROPOUT)
    params = transformer.init(jax.random.key(0), config)
    layer = params["layers"]
    layer["proj"] = np.array(layer["proj"])
    layer["proj"][..., D // 2 :] = 0
    layer["down"] = np.zeros_like(layer["down"])
    params["head"] = np.eye(D, 256, dtype=np.float32)  # logits are the stream, normalised
    tokens = np.random.default_rng(0).integers(0, 256, shape)

    def added(key):
        logits = np.asarray(transformer.apply(params, tokens, config, key=key))[..., :D]
        before = np.asarray(params["embed"])[tokens]
        scale = before[..., D - 1 :] / logits[..., D - 1 :]
        return (logits * scale - before)[..., : D // 2]

    parts = added(jax.random.key(1)) / added(None)
    kept = np.abs(parts) > 0.5
    np.testing.assert_allclose(parts[kept], 1 / (1 - DROPOUT), rtol=0.05)
    np.testing.assert_allclose(parts[~kept], 0, atol=0.05)
    assert np.mean(kept) == pytest.approx(1 - DROPOUT, abs=0.02)  # 4 standard deviations
