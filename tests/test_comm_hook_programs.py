"""Communication hooks in use: training ends at the same loss; the programs' flags; the bench."""

import dataclasses
import functools
import json
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl import flags

import gradaccum
from absl_apps import bench, bench_flags, bench_hooks, comm_hooks, corpus, train, train_flags
from gradaccum import hooks

########################################## Final losses ##########################################

# A byte of text from the four before it, by 24,832 parameters, of which 99 % are matrices that all
# hooks compress. 300 steps of sgd: after 100 PowerSGD of rank 2 is still 3 % behind.
STEPS, BATCH, VOCABULARY, CONTEXT, EMBEDDING, HIDDEN = 300, 256, 128, 4, 24, 96
WITHIN = 0.02  # of the loss without a hook
LAST = 20  # the final loss is the mean over these steps
RATE = 0.5


@dataclasses.dataclass(frozen=True)
class Signs:
    """A broken compression: one bit an entry, and no scale."""

    def init(self, unreduced):
        del unreduced
        return ()

    def __call__(self, unreduced, state):
        return jax.tree.map(jnp.sign, gradaccum.mean(unreduced)), state


def init():
    embed, up, down = jax.random.split(jax.random.key(0), 3)
    inner = CONTEXT * EMBEDDING
    return {
        "embed": jax.random.normal(embed, (VOCABULARY, EMBEDDING)),
        "up": jax.random.normal(up, (inner, HIDDEN)) / inner**0.5,
        "bias": jnp.zeros((HIDDEN,)),
        "down": jax.random.normal(down, (HIDDEN, VOCABULARY)) / 100,
    }


def loss_fn(params, tokens):
    x = params["embed"][tokens[:, :-1]].reshape(tokens.shape[0], -1)
    logits = jnp.tanh(x @ params["up"] + params["bias"][None]) @ params["down"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, -1]).mean()


@functools.cache
def batches():
    """Tokens of every step, int32 [STEPS, BATCH, CONTEXT + 1]."""
    files = corpus.find_files([corpus.default_pattern()])
    options = {"max_bytes": 400_000, "vocab_size": None, "document_end": None}
    text, _ = corpus.open_corpus(files, **options).read(0, 400_000)
    starts = np.random.default_rng(0).integers(0, text.size - CONTEXT, (STEPS, BATCH))
    return text[starts[..., None] + np.arange(CONTEXT + 1)].astype(np.int32) % VOCABULARY


@functools.cache
def final_loss(hook):
    """Returns the loss at the end of a run whose means a hook takes; None: an all-reduce."""
    mesh = helpers.data_mesh(8)
    value_and_grad = gradaccum.unreduced_value_and_grad(
        loss_fn, axis_name="dp", mesh=mesh, microbatches=2
    )
    tx = optax.chain(
        gradaccum.all_reduce_mean("dp", mesh=mesh, comm_hook=hook),
        optax.sgd(optax.cosine_decay_schedule(RATE, STEPS, alpha=0.05)),
    )

    def step(carry, tokens):
        params, state = carry
        loss, grads = value_and_grad(params, tokens)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), gradaccum.mean(loss)

    run = jax.jit(
        lambda carry, tokens: jax.lax.scan(step, carry, tokens)[1],
        compiler_options=helpers.COMPILE_FAST,
    )
    params = init()
    losses = np.asarray(run((params, tx.init(params)), batches()))
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.05)
    return losses[-LAST:].mean()


COMPRESSIONS = {
    "bf16": hooks.bf16_compress(),
    "fp16": hooks.fp16_compress(),
    "int8": hooks.int8_quantize(),
    "int8 stochastic": hooks.int8_quantize(rounding="stochastic", error_feedback=True),
    "powersgd": hooks.powersgd(rank=2),
}

BROKEN = {
    "signs": Signs(),
    "powersgd without memory": hooks.powersgd(rank=2, error_feedback=False, warm_start=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("hook", COMPRESSIONS.values(), ids=COMPRESSIONS)
def test_training_ends_at_the_same_loss(hook):
    exact = final_loss(None)
    assert exact < 2.4  # far below the 3.1 of byte frequencies
    assert final_loss(hook) == pytest.approx(exact, rel=WITHIN)
    assert final_loss(hook) != exact  # it did compress


@pytest.mark.slow
@pytest.mark.parametrize("hook", BROKEN.values(), ids=BROKEN)
def test_with_a_broken_compression_it_does_not(hook):
    assert not final_loss(hook) < final_loss(None) * (1 + 5 * WITHIN)  # nor is a NaN


############################################ The flag ############################################

TEXTS = {
    "bf16_compress": hooks.bf16_compress(),
    "bf16_compress:axis_name=replica": hooks.bf16_compress(axis_name="replica"),
    "int8_quantize:error_feedback=True,rounding=stochastic": hooks.int8_quantize(
        error_feedback=True, rounding="stochastic"
    ),
    "int8_quantize:axis_name=('replica','dp'),seed=3": hooks.int8_quantize(
        axis_name=("replica", "dp"), seed=3
    ),
    "int8_quantize:axis_name=['dp']": hooks.int8_quantize(axis_name=("dp",)),
    "int8_quantize:axis_name=None": hooks.int8_quantize(),
    "powersgd:rank=4,start_step=20": hooks.powersgd(rank=4, start_step=20),
    "powersgd:min_compression_rate=1.5": hooks.powersgd(min_compression_rate=1.5),
    "gradient_noise_scale": hooks.gradient_noise_scale(),
    "gradient_noise_scale:decay=0.8,hook=powersgd:rank=2,seed=9": hooks.gradient_noise_scale(
        hooks.powersgd(rank=2, seed=9), decay=0.8
    ),
}


@pytest.mark.parametrize(("text", "hook"), TEXTS.items(), ids=TEXTS)
def test_a_text_is_a_hook(text, hook):
    assert comm_hooks.parse(text) == hook


MISTAKES = {
    "": r"'' is no hook; there are allreduce, bf16_compress, .*, gradient_noise_scale\.",
    "bf16": r"'bf16' is no hook; there are",
    "noop": r"'noop' takes no mean: time it with absl_apps\.bench; there are",
    "gradient_noise_scale:hook=noop": r"'noop' takes no mean",
    "gradient_noise_scale:hook=gradient_noise_scale": r"hook=gradient_noise_scale again",
    "bf16_compress:": r"bf16_compress: got '', not field=value; it takes axis_name=None, each",
    "powersgd:rank": r"got 'rank', not field=value; it takes rank=4, axis_name=None, error_",
    "powersgd:rnk=2": r"powersgd: got 'rnk'; it takes rank=4, .*seed=0, each once\.",
    "powersgd:rank=2,rank=3": r"got 'rank' once more",
    "powersgd:rank=two": r"powersgd: rank=two; it takes int, as 4\.",
    "powersgd:rank=True": r"rank=True; it takes int",
    "powersgd:rank=2,,seed=1": r"rank=2,; it takes int",
    "powersgd:rank=0": r"powersgd: rank=0; required: an int of at least 1",
    "int8_quantize:error_feedback=1": r"error_feedback=1; it takes bool, as False\.",
    "int8_quantize:rounding=up": r"rounding='up'; required: 'nearest' or 'stochastic'",
    "bf16_compress:axis_name=3": r"axis_name=3; it takes an axis of the mesh, as replica, or sev",
    "gradient_noise_scale:decay=1": r"decay=1; required: 0 <= decay < 1",
    "gradient_noise_scale:hook=powersgd:rank=2,decay=0.9": r"powersgd: got 'decay'; it takes",
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_text_that_is_none_is_one_line(text, message):
    with pytest.raises(SystemExit, match=message) as exit_:
        parse(f"--comm_hook={text}")
    assert "\n" not in exit_.value.code
    assert exit_.value.code.startswith("train: ")


########################################## The program ###########################################

TINY = ("--d_model=32", "--n_layer=2", "--n_head=4", "--seq_len=16", "--global_batch=16")


def parse(*args):
    values = flags.FlagValues()
    train_flags.parse(["train", *TINY, "--microbatches=2", *args], values, manual="The manual.")
    return values


def run(tmp_path, *args):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    files = f"--data={text}", f"--workdir={tmp_path / 'run'}"
    found = train.train(parse("--steps=4", "--learning_rate=0.03", *files, *args))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return found, [json.loads(line) for line in lines]


def test_a_run_with_a_state_in_the_optimizer(tmp_path, capsys):
    found, lines = run(tmp_path, "--comm_hook=int8_quantize:error_feedback=True")
    printed = capsys.readouterr().out
    assert "one cross-device mean: checked" in printed
    kinds = {row["kind"]: row["dtype"] for row in found["audit"]["collectives"]}
    assert kinds == {"all-reduce": "f32", "all-to-all": "s8", "all-gather": "s8"}
    # Parameters, two moments, what each device could not send of what is compressed (all but the
    # scales of norms), and counts: two of steps, one of means.
    scales = 5 * 32
    assert found["state_bytes"] == 4 * (4 * found["parameters"] - scales) + 12
    assert found["flags"]["comm_hook"] == "int8_quantize:error_feedback=True"
    assert lines[0]["loss"] == pytest.approx(math.log(256), abs=0.01)
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
    assert "noise_scale" not in lines[-1]


@pytest.mark.slow
def test_a_sharded_run_that_measures_and_compresses_between_replicas(tmp_path, capsys):
    hook = "gradient_noise_scale:decay=0.5,hook=powersgd:rank=2,start_step=2,axis_name=replica"
    mesh = "--zero=2", "--mesh=replica=2,dp=2,mp=2"
    found, lines = run(tmp_path, *mesh, f"--comm_hook={hook}")
    printed = capsys.readouterr().out
    assert "one cross-device mean: checked" in printed
    assert all(line["noise_scale"] > 0 for line in lines)
    assert found["noise_scale"] == lines[-1]["noise_scale"]
    assert f"gradient noise scale: {found['noise_scale']:.1f} sequences\n" in printed
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


@pytest.mark.slow
def test_gradients_in_parts_are_scattered_in_float16(tmp_path):
    found, lines = run(tmp_path, "--zero=3", "--comm_hook=fp16_compress")
    large = [row for row in found["audit"]["collectives"] if row["bytes"] > 1024]
    assert {(row["kind"], row["dtype"]) for row in large} == {
        ("all-gather", "f32"),  # of parameters
        ("reduce-scatter", "f16"),
    }
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


@pytest.mark.parametrize("outer", ["", "gradient_noise_scale:hook="])
def test_an_axis_that_the_mesh_lacks_is_one_line(tmp_path, outer):
    message = r"^train: --comm_hook: axis_name='replica', but the mesh's data axes are dp; name of"
    with pytest.raises(SystemExit, match=message):
        run(tmp_path, f"--comm_hook={outer}bf16_compress:axis_name=replica")
    assert not (tmp_path / "run").exists()


########################################### The bench ############################################


def bench_of(*args):
    values = flags.FlagValues()
    sizes = "--grad_acc_steps=2", "--batch_size=16", "--d_model=64", "--n_layer=2", "--rounds=1"
    bench_flags.parse(["bench", *sizes, "--noprogram_size", *args], values, manual="")
    return bench.bench(values)


def test_the_bench_counts_what_each_hook_sends(capsys):
    names = "gradaccum,fp16_compress,int8_quantize,powersgd,noop"
    results = bench_of(f"--contenders={names}")
    printed = capsys.readouterr().out
    tree, rows = 2 * 64 * 64 * 4, results["contenders"]
    sent = {name: row["wire_bytes"] / (2 * 7 / 8 * tree) for name, row in rows.items()}
    assert sent["gradaccum"] == pytest.approx(1, abs=1e-3)
    assert sent["fp16_compress"] == pytest.approx(1 / 2, abs=1e-3)
    # To blocks of 256 and their scales, of which each device adds up whole ones.
    assert sent["int8_quantize"] == pytest.approx((1 + 4 / 256) * 10 / 8 / 4, rel=0.1)
    assert sent["powersgd"] == pytest.approx(4 * (64 + 64) / 64**2, abs=1e-3)
    assert sent["noop"] < 1e-3
    for name, difference in results["differences"].items():
        assert difference["update"] <= (bench_hooks.HOOKS.get(name, (0, 0))[1] or 1e-5), name
    assert results["differences"]["int8_quantize"]["update"] > 1e-3
    assert results["differences"]["noop"]["update"] > 0.05
    assert "noop: update within " in printed
    assert "(no mean: not compared)" in printed
    checked = next(line for line in printed.splitlines() if "one cross-device mean" in line)
    assert "powersgd:" in checked
    assert "noop" not in checked


def test_a_compression_that_loses_more_is_refused(monkeypatch):
    broken = functools.partial(bench_hooks.hooked, hook=Signs(), tolerance=2e-2)
    monkeypatch.setitem(bench_flags.CONTENDERS["steps"], "int8_quantize", broken)
    with pytest.raises(ArithmeticError, match=r"differ from .* more than 0\.02 .*'int8_quantize'"):
        bench_of("--contenders=gradaccum,int8_quantize")
