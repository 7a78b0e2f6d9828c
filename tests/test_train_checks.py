"""What cannot be combined is refused in one line, with the numbers and the remedy; what can is not.

Whatever flags alone tell is refused as they are read, the rest before anything is compiled.
"""

import contextlib
import re

import numpy as np
import pytest
from absl import flags
from token_data import written

from absl_apps import train, train_checks, train_flags, train_start

SMALL = ("--d_model=16", "--n_layer=1", "--n_head=2", "--seq_len=16", "--global_batch=16")
PARTS = (*SMALL, "--microbatches=1")


def parse(*args):
    values = flags.FlagValues()
    train_flags.parse(["train", *args], values, manual="The manual.")
    return values


def refusal(run, *args):
    """The one line that a user sees."""
    with pytest.raises(SystemExit) as exit_:
        run(*args)
    assert exit_.value.code.startswith("train: ")
    assert "\n" not in exit_.value.code
    return exit_.value.code


def of(value):
    return " ".join(value) if isinstance(value, list) else ""


########################################## Flags alone ###########################################

REFUSED = [
    # Values.
    (["--seed=-1"], "--seed=-1: -1 is not an integer in the range [0, 4294967295]"),
    (["--seed=4294967296"], "--seed=4294967296: 4294967296 is not an integer in the range [0, 42"),
    (["--dropout=1"], "--dropout=1.0: 1 is no part of a whole: 0 <= part < 1."),
    (["--dropout=-0.1"], "-0.1 is no part of a whole"),
    (["--dropout=nan"], "nan is no part of a whole"),
    (["--eval_fraction=1"], "--eval_fraction=1.0: 1 is no part of a whole"),
    (["--eval_fraction=-0.5"], "-0.5 is no part of a whole"),
    (["--learning_rate=inf"], "--learning_rate=inf: must be finite, in float32."),
    (["--learning_rate=3.5e38"], "--learning_rate=3.5e+38: must be finite, in float32."),
    (["--learning_rate=-1"], "--learning_rate=-1: -1.0 is not a non-negative number"),
    (["--weight_decay=nan"], "--weight_decay=nan: must be finite, in float32."),
    (["--clip_norm=inf"], "--clip_norm=inf: must be finite, in float32."),
    (["--clip_norm=-1"], "--clip_norm=-1: -1.0 is not a non-negative number"),
    (["--optimizer=sgd", "--weight_decay=0.1"], "=0.1: sgd has none; take adamw or lion."),
    (["--n_layer=0"], "--n_layer=0"),
    (["--d_model=20", "--n_head=4"], "d_model = 20 is not divisible by 2 * n_head = 2 * 4 = 8"),
    # Tokens.
    (["--vocab_size=65537"], "--vocab_size=65537: token files are of uint16, which holds 65536 t"),
    (["--document_end=5"], "--document_end=5 is of token files, which need --vocab_size; in text"),
    (["--vocab_size=9", "--document_end=9"], "=9 is none of the tokens 0 to 8 of --vocab_size=9."),
    (["--document_end=-1", "--vocab_size=9"], "--document_end=-1"),
    # What would be ignored.
    (["--eval_data=x", "--eval_fraction=0.5"], "--eval_fraction=0.5 beside --eval_data: of --dat"),
    (["--eval_fraction=0", "--eval_every=9"], "--eval_every=9 beside --eval_fraction=0: nothing"),
    (["--keep=0", "--checkpoint_every=9"], "--checkpoint_every=9 beside --keep=0: none is writ"),
    (["--hbm_gb=1"], "--hbm_gb=1: is for --microbatches=auto, and --microbatches is 4; give one"),
    (["--hbm_gb=1", "--microbatches=2"], "and --microbatches is 2; give one of them."),
    # Steps.
    (["--steps=5", "--warmup_steps=6"], "6 warmup steps do not fit in 5 steps; both count optim"),
    (["--steps=5", "--profile_steps=3:6"], "step 5 is not taken: they count from 0, and --steps="),
    (["--profile_steps=3:3"], "'3:3' is not start:stop with start < stop; write for example 10:15"),
    (["--profile_steps=3"], "'3' is not start:stop with start < stop"),
    (["--profile_steps=-1:3"], "'-1:3' is not start:stop with start < stop"),
    (["--every_k=0"], "--every_k=0"),
    # Devices.
    (["--mesh="], "'' is not a new axis name=size with size >= 1; write for example --mesh=dp=8."),
    (["--mesh=dp=0"], "'dp=0' is not a new axis name=size with size >= 1"),
    (["--mesh=dp=2,dp=4"], "'dp=4' is not a new axis"),
    (["--mesh=fsdp=2,dp=4"], "axes fsdp, dp, but this program splits the batch over dp or fsdp,"),
    (["--mesh=replica=2"], "axes replica, but this program splits the batch"),
    (["--mesh=dp=2,mp=2,replica=2"], "axes dp, mp, replica, but this program splits the batch"),
    (["--zero=0", "--mesh=fsdp=8"], "--zero=0 splits nothing over the axis fsdp; call it dp, or"),
    (["--zero=0", "--mesh=replica=2,fsdp=2,mp=2"], "--zero=0 splits nothing over the axis fsdp"),
    (["--zero=-1"], "--zero=-1"),
    # Communication.
    (["--comm_hook="], "'' is no hook; there are allreduce, bf16_compress, fp16_compress, int8_q"),
    (["--comm_hook=noop"], "'noop' takes no mean: time it with absl_apps.bench"),
    (["--comm_hook=powersgd:rank=0"], "rank"),
    (["--reduce_dtype=bfloat16", "--comm_hook=allreduce"], "=allreduce: the hook says what travel"),
    (
        ["--reduce_dtype=bfloat16", "--every_k=2"],
        "--reduce_dtype=bfloat16 beside --every_k=2: a window's mean is the optimizer's, which a h"
        "ook replaces; write --comm_hook=bf16_compress.",
    ),
    (["--reduce_dtype=float16", "--every_k=2"], "write --comm_hook=fp16_compress."),
    (["--reduce_dtype=float32"], "bfloat16|float16"),
]


@pytest.mark.parametrize(("args", "message"), REFUSED, ids=of)
def test_refused_as_it_is_read(args, message):
    assert message in refusal(parse, *args)


READ = [
    ["--seed=0"],
    ["--seed=4294967295"],
    ["--dropout=0"],
    ["--dropout=0.99"],
    ["--learning_rate=0"],
    ["--learning_rate=3.4e38"],
    ["--clip_norm=0"],
    ["--weight_decay=0", "--optimizer=sgd"],
    ["--weight_decay=0.1"],
    ["--weight_decay=0.1", "--optimizer=lion"],
    ["--d_model=24", "--n_head=4"],
    ["--vocab_size=65536", "--document_end=65535"],
    ["--vocab_size=50257"],
    ["--document_end=0", "--vocab_size=1"],
    ["--eval_data=x"],
    ["--eval_data=x", "--eval_fraction=0"],
    ["--eval_data=x", "--eval_every=9"],
    ["--eval_fraction=0"],
    ["--eval_fraction=0", "--eval_every=0"],
    ["--eval_fraction=0", "--eval_every=9", "--eval_data=x"],
    ["--eval_fraction=0.5", "--eval_every=9"],
    ["--eval_every=0"],
    ["--keep=0"],
    ["--keep=0", "--checkpoint_every=0"],
    ["--keep=1", "--checkpoint_every=9"],
    ["--checkpoint_every=0"],
    ["--hbm_gb=1", "--microbatches=auto"],
    ["--microbatches=auto"],
    ["--steps=5", "--warmup_steps=5"],
    ["--steps=5", "--warmup_steps=0"],
    ["--steps=5", "--profile_steps=4:5"],
    ["--mesh=dp=1"],
    ["--mesh=fsdp=8", "--zero=1"],
    ["--mesh=replica=2,dp=4", "--zero=0"],
    ["--mesh=replica=2,fsdp=2,mp=2"],
    ["--mesh=dp=2, mp=2"],
    ["--zero=3"],
    ["--reduce_dtype=bfloat16", "--every_k=1"],
    ["--comm_hook=bf16_compress", "--every_k=2"],
]


@pytest.mark.parametrize("args", READ, ids=of)
def test_what_can_be_is_read(args):
    parse(*args)


def test_a_default_contradicts_nothing_and_a_file_does(tmp_path):
    """What a file of flags says is written, as on the command line, where the last one counts."""
    file = tmp_path / "some.flags"
    file.write_text("--checkpoint_every=20\n")
    assert parse("--keep=0").checkpoint_every == 50
    message = refusal(parse, f"--flagfile={file}", "--keep=0")
    assert "--checkpoint_every=20 beside --keep=0" in message
    parse(f"--flagfile={file}", "--keep=0", "--checkpoint_every=0")


def test_the_stage_of_an_axis_that_is_named_for_it():
    stages = [(zero, axis) for axis in ("dp", "fsdp") for zero in (None, 1, 2, 3)]
    got = [train_checks.stage(zero, {"replica": 2, axis: 4}) for zero, axis in stages]
    assert got == [0, 1, 2, 3, 3, 1, 2, 3]
    assert train_checks.stage(0, {"dp": 8}) == 0


#################################### Flags, devices and data #####################################


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Paths by name: text, tokens of which 7 ends documents, and tokens that all do."""
    directory = tmp_path_factory.mktemp("data")
    tokens = np.random.default_rng(0).integers(0, 8, 2_000)
    middle = [7] * 40 + [1] * 6 + [7] * 46  # of 6 sequences, targets are in the third
    contents = {"text": b"a quick brown fox. " * 100, "tokens": tokens, "ends": [7] * 100}
    contents |= {"short": b"short", "none": b"", "middle": middle}
    return dict(zip(contents, map(str, written(directory, contents.values())), strict=True))


@pytest.fixture
def started(data, tmp_path):
    """Starts a run with flags in which {name} is a file of `data`; returns its workdir, and it."""
    with contextlib.ExitStack() as stack:

        def start(*args):
            args = [arg.format(**data) for arg in args]
            if not any(arg.startswith("--data=") for arg in args):
                args.append(f"--data={data['text']}")
            found = train_start.start(parse(*PARTS, f"--workdir={tmp_path / 'run'}", *args))
            stack.enter_context(found.outputs)
            return found

        yield start


ENDING = "--data={tokens}", "--vocab_size=8", "--document_end=7"

MISTAKES = [
    # Data.
    (["--vocab_size=8"], "--vocab_size=8: ", "is text, whose vocabulary is the 256 bytes; leave"),
    (["--data={tokens}"], "--vocab_size: ", "give it: 50257 for GPT-2's tokenizer."),
    (["--data={tokens}", "--vocab_size=7"], "7, not below --vocab_size=7 (the largest near it: 7)"),
    (["--data={tokens},{text}", "--vocab_size=8"], "token files and text cannot be mixed"),
    (["--data={tokens}", "--vocab_size=8", "--eval_data={text}"], "--vocab_size=8: ", "is text,"),
    (["--eval_data={tokens}"], "--vocab_size: ", "holds tokens, and not the size of their vocabu"),
    (["--eval_data=/nowhere"], "--eval_data: no file matches /nowhere."),
    (["--eval_data={none}"], "--eval_data: no byte in "),
    (["--data={none}"], "--data: no byte in "),
    (["--data={short}"], "--data: 5 tokens hold 0 whole sequences of --seq_len=16 + 1; give mor"),
    (["--seq_len=1900"], "--data: 1,900 tokens hold 0 whole sequences of --seq_len=1900 + 1; giv"),
    (["--max_data_bytes=16"], "--data: 16 tokens hold 0 whole sequences of --seq_len=16 + 1"),
    (
        ["--max_data_bytes=17"],
        "--eval_fraction=0.05: 17 tokens hold 1 whole sequences of --seq_len=16 + 1, and 1 of all ",
        "none is left to train on; give more data, a smaller --seq_len, or 0.",
    ),
    (
        [*ENDING, "--eval_data={middle}", "--eval_sequences=2"],
        "--eval_sequences=2: of the 6 sequences held out these have no target, as all their token",
        "begin documents; take more.",
    ),
    (["--eval_fraction=0.999"], "119 of all 119 are held out: none is left to train on"),
    (
        ["--data={ends}", "--vocab_size=8", "--document_end=7"],
        "each token that the 6 sequences to train on would predict is the first of a document; gi",
    ),
    (
        [*ENDING, "--eval_data={ends}"],
        "--eval_data: its 100 tokens are all the first of a document, which nothing predicts; give",
    ),
    # Steps.
    (["--every_k=3"], "by every_k * microbatches * devices = 3 * 1 * 8 = 24; the nearest that is"),
    (["--every_k=3", "--mesh=dp=2", "--microbatches=2"], "= 12; the nearest that is: 12 or 24."),
    (["--microbatches=auto", "--every_k=4", "--hbm_gb=1"], "4 * 1 * 8 = 32; the nearest that is"),
    (["--microbatches=auto"], "--hbm_gb: a device of kind cpu has no limit of its own; say how m"),
    # Devices.
    (["--sequence_parallel", "--mesh=fsdp=2"], "write for example --mesh=dp=4,mp=2."),
    # Communication.
    (["--comm_hook=powersgd:axis_name=replica"], "'replica', but the mesh's data axes are dp; nam"),
    (
        ["--comm_hook=gradient_noise_scale:hook=int8_quantize:axis_name=mp", "--mesh=dp=4,mp=2"],
        "--comm_hook: axis_name='mp', but the mesh's data axes are dp",
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: of(m[0]).replace("/", "_"))
def test_refused_before_anything_is_computed(mistake, data, tmp_path):
    args, *messages = mistake
    args = [arg.format(**data) for arg in args]
    given = any(arg.startswith("--data=") for arg in args)
    args += [f"--workdir={tmp_path / 'run'}"] + ([] if given else [f"--data={data['text']}"])
    line = refusal(lambda: train.train(parse(*PARTS, *args)))
    for message in messages:
        assert message in line, line
    assert not (tmp_path / "run").exists()


STARTED = [
    [*ENDING],
    ["--data={tokens}", "--vocab_size=50257", "--eval_data={tokens}"],
    ["--data={ends}", "--vocab_size=8"],
    ["--eval_data={short}"],
    [*ENDING, "--eval_data={middle}", "--eval_sequences=3"],
    [*ENDING, "--eval_data={middle}", "--eval_sequences=2", "--eval_every=0"],
    ["--data={text},{short}"],
    ["--seq_len=1899", "--eval_fraction=0"],
    ["--max_data_bytes=17", "--eval_fraction=0"],
    ["--max_data_bytes=18"],
    ["--eval_fraction=0.99"],
    ["--every_k=2"],
    ["--every_k=4", "--mesh=dp=2", "--microbatches=2"],
    ["--microbatches=auto", "--every_k=2", "--hbm_gb=1"],
    ["--mesh=replica=2,dp=4"],
    ["--mesh=dp=4,mp=2", "--sequence_parallel"],
    ["--mesh=dp=4,mp=2", "--seq_len=15"],
    ["--mesh=dp=2,mp=4", "--n_head=4"],
    ["--mesh=dp=3", "--global_batch=15"],
    ["--comm_hook=powersgd:axis_name=replica", "--mesh=replica=2,dp=4"],
    ["--comm_hook=int8_quantize", "--zero=3", "--every_k=2"],
]


@pytest.mark.parametrize("args", STARTED, ids=lambda args: of(args).replace("/", "_"))
def test_what_can_be_starts(args, started):
    found = started(*args)
    assert re.fullmatch("[0-9a-f]{16}( [0-9a-f]{16})?", found.data.fingerprint)
    sizes = len(found.data.train), len(found.data.held_out or ())
    assert sizes[0] > 0
    assert (sizes[1] == 0) == ("--eval_fraction=0" in args)
