"""What the training program's flags do: whole runs, and single steps, against plain computations.

A run is replayed in float64 on one device: losses over the real tokens alone and means over the
targets alone, written out; sgd by hand; rates by their formula.
"""

import math
import re

import event_records
import helpers
import numpy as np
import pytest
from token_data import opened, written
from train_plain import Stepper, T, cut, exact, norm_of, parse, replay, unequal

from absl_apps import batches, train, transformer
from gradaccum import audit

########################################### Whole runs ###########################################

STEPS, PEAK, END = 5, 0.5, 299
TRAINING = (f"--steps={STEPS}", "--optimizer=sgd", f"--learning_rate={PEAK}", "--warmup_steps=2")


def assert_same(lines, want, within=2e-4):
    for line, wanted in zip(lines, want, strict=True):
        assert set(wanted) <= set(line)
        assert ("eval_loss" in line) == ("eval_loss" in wanted), line
        for name, x in wanted.items():
            assert line[name] == pytest.approx(x, rel=within), (line["step"], name)


def documents(size, vocab_size, end):
    """Tokens of documents of about 6 tokens, some empty, half of one word over and over."""
    rng = np.random.default_rng(0)
    tokens = np.where(np.arange(size) % 2, 7, rng.integers(0, vocab_size, size))
    return np.where(rng.random(size) < 1 / 6, end, tokens)


@pytest.fixture(scope="module")
def tokens():
    return documents(2_000, 300, END)


def run(workdir, tokens, *args, vocab_size=300, end=END):
    """Runs the program on tokens; returns run.json, the lines of metrics, and the directory."""
    (file,) = written(workdir, [tokens])
    files = f"--data={file}", f"--vocab_size={vocab_size}", f"--document_end={end}"
    out = workdir / "run"
    done = train.train(parse(*TRAINING, "--schedule=linear", *files, f"--workdir={out}", *args))
    return done, event_records.lines_of(out), out


def steps_of(directory, data, count):
    """The batches of the first steps of a run on so many sequences: in Grain's order, cut here."""
    numbers = opened(*written(directory, [range(count * T + 1)]), vocab_size=1 << 16)
    order = batches.training(batches.Sequences(numbers, T), 0, 8, np.arange(8))
    rows = [order[step]["tokens"][:, 0] // T for step in range(STEPS)]
    return [{name: x[r] for name, x in data.items()} for r in rows]


@pytest.fixture(scope="module")
def replayed(tokens, tmp_path_factory):
    """Evaluated at the ends of steps -> lines of a run that holds 13 of 125 sequences out."""
    data = cut(tokens, END)
    train_on = steps_of(tmp_path_factory.mktemp("order"), data, 112)

    def of(evaluated, held_out):
        held_out = {name: x[112 + np.array(held_out)] for name, x in data.items()}
        return replay(train_on, 300, STEPS, PEAK, 2, held_out, evaluated)

    return of


@pytest.fixture(scope="module")
def one_call(tokens, tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    return run(directory, tokens, "--eval_fraction=0.1", "--eval_every=2")


def test_a_run_is_the_plain_one(one_call, replayed):
    """Losses, norms, rates that are really taken, and losses of all that is held out."""
    done, lines, _ = one_call
    assert (done["data"]["train_sequences"], done["data"]["eval_sequences"]) == (112, 13)
    want = replayed({1, 3, 4}, range(13))
    assert_same(lines, want)
    assert want[0]["loss"] - want[-1]["loss"] > 0.3
    assert max(line["gradient_norm"] for line in want) > 1  # so that some are clipped


def test_a9_steps_of_two_calls_are_steps(tokens, replayed, tmp_path):
    """The same global batch a step, so the same metrics; rates are of steps, not of calls."""
    parts = "--every_k=2", "--eval_fraction=0.1", "--eval_every=3", "--eval_sequences=5"
    _, lines, _ = run(tmp_path, tokens, *parts)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert_same(lines, replayed({2, 4}, [0, 2, 5, 7, 10]))  # of 13, five spread evenly
    assert all(line["tokens_per_second"] > 0 for line in lines)


def test_tensorboard_shows_the_lines(one_call):
    _, lines, workdir = one_call
    shown = event_records.shown(workdir)
    want = [
        (tag, line["step"], np.float32(x))
        for line in lines
        for tag, x in line.items()
        if tag != "step"
    ]
    assert sorted(shown) == sorted(want)


GPT2 = {"vocab_size": 50_257, "end": 50_256}


def test_a_run_on_tokens_of_gpt2(tmp_path, capsys):
    """Its vocabulary, padded to 50,304, over two model devices; data of its own held out."""
    tokens, others = (documents(size, 50_257, 50_256) for size in (1_000, 100))
    (tmp_path / "others").mkdir()
    (held_out,) = written(tmp_path / "others", [others])
    parts = f"--eval_data={held_out}", "--mesh=dp=2,mp=2", "--comm_hook=gradient_noise_scale"
    done, lines, _ = run(tmp_path, tokens, *parts, "--steps=2", "--warmup_steps=1", **GPT2)
    _, counts = np.unique(tokens, return_counts=True)
    p = counts / len(tokens)
    assert done["data"]["unigram_entropy"] == pytest.approx(-np.sum(p * np.log(p)))
    assert f"token-unigram entropy: {-np.sum(p * np.log(p)):.3f} nats" in capsys.readouterr().out
    assert done["parameters"] == 2 * 50_304 * 16 + 2 * (12 * 16 * 16 + 2 * 16) + 16
    assert lines[0]["loss"] == pytest.approx(math.log(50_257), rel=1e-6)  # log 50,304: 9e-5 more

    train_on = steps_of(tmp_path / "others", cut(tokens, 50_256), 63)
    want = replay(train_on, 50_257, 2, PEAK, 1, cut(others, 50_256), {1})
    assert_same(lines, want)
    assert all(line["noise_scale"] > 0 for line in lines)
    assert done["noise_scale"] == lines[-1]["noise_scale"]


########################################### Single steps ###########################################


@pytest.mark.parametrize(
    ("args", "vocab_size"),
    [
        (["--mesh=dp=2"], 300),
        (["--mesh=dp=2,mp=2"], 50_257),
        (["--every_k=2", "--mesh=dp=2", "--remat=dots"], 300),
        (["--comm_hook=allreduce", "--zero=2"], 300),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_a_step_is_of_the_mean_of_all_targets(args, vocab_size):
    """However many each microbatch, device and call has; and of the real tokens' softmax alone."""
    batch = unequal(vocab_size)
    stepper = Stepper(f"--vocab_size={vocab_size}", *args)
    calls = 2 if "--every_k=2" in args else 1
    parts = [{k: x[i::calls] for k, x in batch.items()} for i in range(calls)]
    measured, params = stepper(*parts)
    (loss, _), grads = exact(stepper.params, batch, vocab_size)
    assert measured["loss"] == pytest.approx(loss, rel=1e-5)
    assert measured["gradient_norm"] == pytest.approx(norm_of(grads), rel=1e-4)
    assert np.all(params["head"][:, vocab_size:] == 9)

    # Not of means that count alike: of rows here, which have more targets or fewer.
    rows = [{name: x[[i]] for name, x in batch.items()} for i in (0, 1, 4, 5, 6)]
    means = [exact(stepper.params, row, vocab_size)[0][0] for row in rows]
    assert abs(np.mean(means) - loss) > 0.01


######################################### Memory, dtypes #########################################


def test_remat_changes_memory_and_not_the_step():
    steppers = {how: Stepper("--vocab_size=300", f"--remat={how}") for how in transformer.REMAT}
    batch = unequal()
    found = {how: stepper(batch) for how, stepper in steppers.items()}
    for how in ("dots", "none"):
        helpers.assert_close(found[how], found["layer"])
    temp = [steppers[how].step.memory_analysis().temp_size_in_bytes for how in transformer.REMAT]
    assert temp[0] < temp[1] < temp[2], temp  # layer, dots, none


@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "bf16"), ("float16", "f16")])
def test_gradients_travel_in_the_reduce_dtype(dtype, name):
    batch = unequal()
    stepper = Stepper("--vocab_size=300", f"--reduce_dtype={dtype}")
    reduced = re.findall(
        r'"stablehlo.all_reduce".*?: \(tensor<(?:[0-9]+x)*(\w+)>\) -> tensor',
        stepper.lowered.as_text(),
        flags=re.S,
    )
    # Of nine gradients, and of the loss and the number of targets.
    assert sorted(reduced) == sorted([name] * 9 + ["f32"] * 2)
    mesh = stepper.program.setup.mesh
    audit.assert_one_reduction(stepper.step, axis_name="dp", mesh=mesh)
    bytes_of = audit.collectives(stepper.step, mesh=mesh).totals["dp"].bytes
    # XLA's CPU backend promotes sums of bfloat16.
    assert bytes_of == 8 + {"bf16": 4, "f16": 2}[name] * transformer.size(stepper.params)

    measured, _ = stepper(batch)
    (loss, _), grads = exact(stepper.params, batch, 300)
    assert measured["loss"] == pytest.approx(loss, rel=1e-5)
    off = abs(measured["gradient_norm"] / norm_of(grads) - 1)
    assert 1e-6 < off < 1e-2, off
