"""The training program: a run, its files, its mistakes, and one real run of the command.

Compiling is what costs here: two runs of the same flags, one in this process and one by the
command, serve every test that can do with them.
"""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import helpers
import jax
import numpy as np
import pytest
from absl import flags
from train_runs import losses, metrics

from absl_apps import train, train_flags

TINY = ("--d_model=16", "--n_layer=2", "--n_head=2", "--seq_len=16")
BATCH = ("--global_batch=16", "--microbatches=2")
RUN = (*TINY, *BATCH, "--steps=20", "--learning_rate=0.03")


def parse(*args):
    values = flags.FlagValues()
    train_flags.parse(["train", *args], values, manual="The manual.")
    return values


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    return path


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """What a run of this process returned, and its directory."""
    workdir = tmp_path_factory.mktemp("named") / "run"
    return train.train(parse(*RUN, f"--data={text}", f"--workdir={workdir}")), workdir


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / "run"


def test_a_sharded_run_is_described(text, workdir, finished, capsys):
    flags_ = ("--mesh=replica=2,fsdp=4", "--steps=2", f"--workdir={workdir}")
    run = train.train(parse(*TINY, *BATCH, "--learning_rate=0.03", f"--data={text}", *flags_))
    printed = capsys.readouterr().out
    assert "mesh: replica=2,fsdp=4, cpu" in printed
    assert f"state: {run['state_bytes']:,} bytes of parameters and optimizer on each" in printed
    assert "one cross-device mean: checked" in printed
    whole = finished[0]["state_bytes"]
    assert whole == 3 * 4 * run["parameters"] + 8  # adamw's two moments, and two counts of steps
    assert whole / 4 < run["state_bytes"] < whole / 2  # what is small stays whole
    # Between replicas a part of the gradients crosses, whole only what is small.
    assert run["audit"]["totals"]["replica"]["bytes"] < 4 * run["parameters"] / 2
    assert losses(workdir)[0] == pytest.approx(losses(finished[1])[0], abs=1e-3)


def test_loss_falls_below_the_unigram_entropy(finished):
    run, workdir = finished
    assert losses(workdir)[0] == pytest.approx(math.log(256), abs=0.01)
    assert run["final_loss"] < run["data"]["unigram_entropy"] - 0.3
    assert run["final_loss"] == pytest.approx(np.mean(losses(workdir)[-10:]))


########################################### Its files ############################################


def test_another_run_is_not_overwritten(text, workdir):
    workdir.mkdir()
    (workdir / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(
        SystemExit, match=r"holds metrics\.jsonl but no run\.json: is no run of this"
    ):
        train.train(parse(*RUN, f"--data={text}", f"--workdir={workdir}"))
    assert (workdir / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert os.listdir(workdir) == ["metrics.jsonl"]


#################################### As many as fit the memory ###################################


def test_auto_takes_the_fewest_that_fit(text, workdir, capsys):
    options = (*TINY, "--global_batch=64", "--steps=2", f"--data={text}")
    run = train.train(
        parse(*options, "--microbatches=auto", "--hbm_gb=0.0004", f"--workdir={workdir}")
    )
    k, plan = run["microbatches"], run["plan"]
    fits = {trial["microbatches"]: trial["fits"] for trial in plan["trials"]}
    assert k > 1
    assert (fits[k], fits[k // 2]) == (True, False)
    printed = capsys.readouterr().out
    assert f"--microbatches=auto: {k}, of what was compiled:" in printed
    assert f"dp * {k} microbatches * {8 // k} sequences" in printed

    chosen = train.train(parse(*options, f"--microbatches={k}", f"--workdir={workdir}-chosen"))
    assert chosen["plan"] is None
    assert losses(pathlib.Path(f"{workdir}-chosen")) == losses(workdir)


def test_auto_where_nothing_fits(text, workdir):
    auto = "--microbatches=auto", "--hbm_gb=0.00001", f"--data={text}", f"--workdir={workdir}"
    with pytest.raises(SystemExit, match=r"no candidate fits: .*The arguments alone take"):
        train.train(parse(*TINY, *auto))
    assert not (workdir / "run.json").exists()


############################################ Mistakes ############################################


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh=dp"], r"--mesh=dp: 'dp' is not a new axis name=size"),
        (["--mesh=mp=2"], r"axes mp, but this program splits the batch over dp or fsdp, alone or"),
        (["--mesh=dp=4,replica=2"], r"axes dp, replica, but .* write --mesh=dp=8, --mesh=fsdp"),
        (["--zero=4"], r"--zero=4: integer must be .*<= 3|zero.*3"),
        (["--n_head=3"], r"d_model = 128 is not divisible by 2 \* n_head = 2 \* 3 = 6"),
        (["--steps=0"], r"--steps=0"),
        (["--microbatches=-1"], r"--microbatches=-1: is not an integer of at least 1, or auto"),
        (["--microbatches=some"], r"--microbatches=some: is not an integer of at least 1, or auto"),
        (["--hbm_gb=0"], r"--hbm_gb=0.*: must be more than 0"),
        (["--warmup_steps=9", "--steps=5"], r"9 warmup steps do not fit in 5 steps"),
        (["--learning_rate=nan"], r"--learning_rate=nan: must be finite"),
        (["--optimizer=adma"], r"adamw\|lion\|sgd"),
        (["--step=5"], r"Unknown command line flag 'step'"),
        (["5"], r"'5' is not a flag"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_bad_flags_are_one_line(args, message):
    with pytest.raises(SystemExit, match=message) as exit_:
        parse(*args)
    assert "\n" not in exit_.value.code


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--global_batch=30", "--microbatches=4"],
            r"--global_batch=30: .* 4 \* 8 = 32; the nearest that is: 32\.",
        ),
        (
            ["--global_batch=30", "--microbatches=4", "--mesh=dp=3"],
            r"4 \* 3 = 12; the nearest that is: 24 or 36\.",
        ),
        (["--mesh=dp=16"], r"--mesh=dp=16: needs 16 devices, found 8"),
        (["--data=/nowhere/*.txt,/nowhere/else"], r"no file matches /nowhere/\*\.txt, /nowhere/el"),
        (["--data=,"], r"no file matches"),
        (["--max_data_bytes=128"], r"--data: 128 tokens hold 0 whole sequences of --seq_len=128"),
        (["--hbm_gb=1"], r"--hbm_gb=1: is for --microbatches=auto, and --microbatches is 4; give"),
        (["--microbatches=auto"], r"--hbm_gb: a device of kind cpu has no limit of its own; say"),
        (["--microbatches=auto", "--global_batch=30"], r"--global_batch=30: .* 1 \* 8 = 8; the"),
        (
            ["--comm_hook=gradient_noise_scale", "--mesh=dp=1"],
            r"noise_scale: compares devices, and there is 1 along the data axes; give 2 or more",
        ),
        (["--workdir=/proc/none"], r"--workdir=/proc/none: cannot be used: "),
        ([f"--workdir={__file__}"], r"is a file; name a directory"),
    ],
    ids=lambda value: "-".join(value).replace("/", "_") if isinstance(value, list) else "",
)
def test_mistakes_are_one_line_before_anything_is_computed(args, message, workdir):
    with pytest.raises(SystemExit, match=message) as exit_:
        train.train(parse(f"--workdir={workdir}", *args))
    assert "\n" not in exit_.value.code
    assert not workdir.exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(text, workdir):
    unstable = ("--optimizer=sgd", "--learning_rate=1e38", "--mesh=dp=1", "--compute_dtype=float32")
    files = f"--data={text}", f"--workdir={workdir}"
    with pytest.raises(SystemExit, match=r"step 1 is not finite: its loss is (nan|inf); lower --l"):
        train.train(parse(*RUN, *unstable, *files))
    assert len(losses(workdir)) == 1


############################################# Flags ##############################################


def test_a3_import_defines_no_flag():
    assert not {name for group in train_flags.GROUPS.values() for name in group} & set(flags.FLAGS)


def test_help_is_grouped_and_complete(capsys):
    values = flags.FlagValues()
    train_flags.define(values)
    grouped = [name for group in train_flags.GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(values)
    with pytest.raises(SystemExit) as exit_:
        parse("--help")
    assert exit_.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith("The manual.\n")
    assert re.findall(r"^  --(\w+)$", shown, re.M) == grouped
    assert re.findall(r"^([A-Z][\w -]+):$", shown, re.M) == list(train_flags.GROUPS)
    assert "Optimizer steps. All other counts of steps are of these too. Default: 150." in shown


def test_flagfile(tmp_path):
    (tmp_path / "small.flags").write_text("--steps=7\n# wide\n--d_model=64\n")
    values = parse(f"--flagfile={tmp_path / 'small.flags'}", "--d_model=32")
    assert (values.steps, values.d_model) == (7, 32)
    with pytest.raises(SystemExit, match=r"^train: Unable to open flagfile: .*/none"):
        parse(f"--flagfile={tmp_path / 'none'}")


######################################## The real command ########################################


@pytest.fixture(scope="module")
def command(text, tmp_path_factory):
    """What the command printed, and the directory that it made for itself."""
    directory = tmp_path_factory.mktemp("command")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment["XLA_FLAGS"] = helpers.XLA_FLAGS  # as here: the run is compared bit by bit
    environment["PYTHONPATH"] = str(pathlib.Path(train.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-m", "absl_apps.train", *RUN, f"--data={text}"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=directory,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    (created,) = (directory / "runs").iterdir()
    return result, created


@pytest.mark.slow
def test_one_seed_gives_one_run(finished, command):
    assert losses(command[1]) == losses(finished[1])


@pytest.mark.slow
def test_the_command_reports(command):
    result, _ = command
    # No bar where there is no terminal, and no noise; but XLA may remark on a slow machine.
    assert not [line for line in result.stderr.splitlines() if "rendezvous" not in line]

    assert "byte-unigram entropy: " in result.stdout
    assert "mesh: dp=8, cpu" in result.stdout
    assert (
        "batch: 16 = 8 devices along dp * 2 microbatches * 1 sequences of 16 bytes" in result.stdout
    )
    assert re.search(r"all-reduce.*dp.*f32", result.stdout)
    assert "one cross-device mean: checked" in result.stdout
    assert re.search(
        r"final loss: \d\.\d{3} nats a byte, the mean of the last 10 of 20", result.stdout
    )
    assert re.search(
        r"in runs/[\d-]+: metrics\.jsonl run\.json loss\.png tensorboard/ checkp", result.stdout
    )


@pytest.mark.slow
def test_the_command_leaves_a_description_of_its_run(command, text):
    workdir = command[1]
    lines = metrics(workdir)
    assert [line["step"] for line in lines] == list(range(20))
    each = {"step", "loss", "gradient_norm", "learning_rate", "tokens_per_second"}
    assert all(set(line) - {"eval_loss"} == each for line in lines)
    assert [line["step"] for line in lines if "eval_loss" in line] == [19]
    assert all(line["tokens_per_second"] > 0 for line in lines)

    run = json.loads((workdir / "run.json").read_text())
    assert run["mesh"] == {"dp": 8}
    assert run["devices"] == {"platform": "cpu", "kind": "cpu", "count": 8}
    assert run["flags"]["microbatches"] == 2
    assert run["flags"]["data"] == [str(text)]
    assert run["versions"]["jax"] == jax.__version__
    assert run["data"]["tokens"] == os.path.getsize(text)
    assert run["final_loss"] == pytest.approx(np.mean(losses(workdir)[-10:]))
    # Every gradient byte is reduced, and no more than those and a few scalars.
    gradient_bytes = 4 * run["parameters"]
    assert gradient_bytes <= run["audit"]["totals"]["dp"]["bytes"] <= gradient_bytes + 1024
    assert {row["executions"] for row in run["audit"]["collectives"]} == {1}
