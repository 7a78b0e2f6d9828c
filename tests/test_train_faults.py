"""Faults of a training run: steps that are not finite, and a learning rate that waits for them."""

import contextlib
import io
import json
import math

import jax
import numpy as np
import optax
import pytest
from train_runs import (
    assert_same_bits,
    lines,
    losses,
    metrics,
    newest,
    refused,
    run,
    saved_calls,
    state,
    unchanged,
    write_text,
)

from absl_apps import batches, corpus, optimizers, train_loop, transformer
from absl_apps.train_state import init_state

RARE, COMMON = "~", "o"  # in one sequence, in every one
RATE, STEPS = 0.03, 6
ALL = ("--checkpoint_every=1", "--keep=9")  # a checkpoint before and after each step
SKIP = "--on_nonfinite=skip"


@pytest.fixture(scope="module")
def rare(tmp_path_factory):
    """Text in which RARE is once, far from its beginning."""
    path = write_text(tmp_path_factory.mktemp("rare"))
    text = path.read_text()
    path.write_text(text[:980] + RARE + text[981:])
    return path


def unknown(byte):
    """The first state of a model that gives infinity wherever it reads this byte."""

    def init(key, setup):
        state = init_state(key, setup)
        embed = state.params["embed"].at[ord(byte)].set(np.inf)
        return state._replace(params={**state.params, "embed": embed})

    return {"init_state": init}


def steps_of(path, batch):
    """The batches of the steps, as the program orders the data, and which of them holds RARE."""
    data = corpus.open_corpus([str(path)], max_bytes=None, vocab_size=None, document_end=None)
    train, _ = batches.split(data, 16, 0)
    dataset = batches.training(train, 0, batch, np.arange(batch))
    found = [dataset[step] for step in range(STEPS)]
    (bad,) = (i for i, batch in enumerate(found) if np.any(batch["tokens"][:, :-1] == ord(RARE)))
    return found, bad


def losses_without(path, batch):
    """The losses of a run on one device, without gradaccum, that knows to leave that step out."""
    taken, bad = steps_of(path, batch)
    config = transformer.Config(16, 1, 2, "float32")
    params = transformer.init(jax.random.key(0), config)
    tx = optimizers.make_optimizer("adamw", optimizers.make_schedule(RATE, None, STEPS))
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, tokens):
        loss, grads = jax.value_and_grad(transformer.loss)(params, tokens, config)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    found = []
    for i, batch in enumerate(taken):
        if i == bad:
            found.append(None)
            continue
        assert batch["mask"].all()
        params, opt_state, loss = step(params, opt_state, batch["tokens"])
        found.append(float(loss))
    return found, bad


########################################## Steps skipped #########################################

WINDOWS = "--every_k=2", "--microbatches=1"
# Hooks of which each device keeps its own errors.
INT8 = "--comm_hook=int8_quantize:error_feedback=True"
POWERSGD = "--comm_hook=powersgd:rank=2,min_compression_rate=1"
HOW = {
    "plain": (),
    "PowerSGD": (POWERSGD,),
    "int8, windows": (INT8, *WINDOWS),
    "ZeRO, windows": ("--mesh=fsdp=8", *WINDOWS),
}


@pytest.fixture(scope="module")
def skipping(rare, tmp_path_factory):
    """Name of HOW -> the directory of a run that skips, what it returned and what it printed."""
    made = {}

    def get(name):
        if name not in made:
            workdir, out, err = (
                tmp_path_factory.mktemp("skip") / "run",
                io.StringIO(),
                io.StringIO(),
            )
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                result = run(workdir, f"--data={rare}", *HOW[name], *ALL, SKIP, **unknown(RARE))
            made[name] = workdir, result, out.getvalue(), err.getvalue()
        return made[name]

    return get


@pytest.mark.parametrize("name", ["PowerSGD", "int8, windows", "ZeRO, windows"])
def test_a_step_that_is_not_finite_is_left_out(name, rare, skipping):
    args, (workdir, result, out, err) = HOW[name], skipping(name)
    calls, hook = 2 if "--every_k=2" in args else 1, "--comm_hook" in " ".join(args)
    want, bad = losses_without(rare, 16)
    assert bad == 2

    before, after, next_ = (state(workdir, *args, call=calls * x) for x in (bad, bad + 1, bad + 2))
    # The norm of a window's gradient; whether it updated; how many windows there were.
    told = (".opt_state.skip_state", ".opt_state.updated", ".window.gradient_step")
    assert_same_bits(after, before, but=told if calls > 1 else ())
    rows = [x for path, x in after.items() if ".acc_grads" in path or ".weight" in path]
    assert bool(rows) == (calls > 1)
    assert not any(map(np.any, rows))
    for part in (".params['head']", ".opt_state", *([".comm_state"] if hook else [])):
        assert any(np.any(next_[path] != after[path]) for path in after if part in path), part
    counts = [int(x) for path, x in next_.items() if path.endswith(".count")]
    assert counts
    assert set(counts) == {bad + 1}  # of bad + 2 steps

    logged = metrics(workdir)
    assert [line["loss"] is None for line in logged] == [x is None for x in want]
    assert [line["step"] for line in logged if line.get("skipped")] == [bad]
    good = [(line["loss"], loss) for line, loss in zip(logged, want, strict=True) if loss]
    within = {"PowerSGD": 0.1, "int8, windows": 0.02}.get(name, 1e-5)  # lossy, as of rank 2
    np.testing.assert_allclose(*zip(*good, strict=True), rtol=within)
    schedule = optimizers.make_schedule(RATE, None, STEPS)
    rates = [float(schedule(step - (step > bad))) for step in range(STEPS)]  # it waits a step
    np.testing.assert_allclose([line["learning_rate"] for line in logged], rates, rtol=1e-6)

    assert result["skipped"] == 1
    assert result["final_loss"] == pytest.approx(np.mean([loss for loss, _ in good]))
    assert f"train: step {bad} is skipped: its loss is nan." in err
    assert "skipped: 1 steps that were not finite" in out


@pytest.mark.parametrize("name", ["plain", "ZeRO, windows"])
def test_a_run_that_stopped_goes_on_without_the_step(name, rare, skipping, tmp_path):
    workdir, skipped = tmp_path / "run", skipping(name)[0]
    args = (f"--data={rare}", *HOW[name], "--checkpoint_every=4")
    before = 4 if "--every_k=2" in args else 2
    for patches in (unknown(RARE), {}):  # and once more from what is saved
        line = refused(
            workdir,
            *args,
            match=r"^train: step 2 is not finite: its loss is nan; lower --learning_rate, in a "
            r"--workdir of its own\. The state before it is saved: --on_nonfinite=skip goes on",
            **patches,
        )
        assert len(line) < 250
        assert saved_calls(workdir) == [before]
        assert lines(workdir) == lines(skipped)[:2]
    got = state(workdir, *HOW[name])
    told = (".opt_state.skip_state", ".opt_state.updated", ".window.gradient_step")
    assert_same_bits(got, state(skipped, *HOW[name], call=before), but=told if before > 2 else ())
    run(workdir, *args, SKIP)
    assert lines(workdir) == lines(skipped)
    got, want = (state(x, *HOW[name]) for x in (workdir, skipped))
    assert_same_bits(got, want, but=(".window.gradient_step",) if before > 2 else ())


def test_steps_in_a_row_stop_a_run_that_skips(rare, tmp_path, monkeypatch):
    assert train_loop.MOST_SKIPPED == 10
    monkeypatch.setattr(train_loop, "MOST_SKIPPED", 3)
    workdir, args = tmp_path / "run", (f"--data={rare}", SKIP)
    message = r"^train: steps {} are not finite, 3 in a row \(of the last, its loss is nan\); lower"
    refused(workdir, *args, match=message.format("0 to 2"), **unknown(COMMON))
    assert newest(workdir) == 3
    assert losses(workdir) == [None] * 3
    refused(workdir, *args, match=message.format("3 to 5"))  # as many more, not all
    assert newest(workdir) == 6
    result = run(workdir, *args)  # there is nothing left to take
    assert math.isnan(result["final_loss"])
    assert json.loads((workdir / "run.json").read_text())["final_loss"] is None
    with unchanged(workdir):
        run(workdir, *args)
