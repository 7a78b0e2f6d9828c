"""Runs of absl_apps.train in this process, stopped where a test says; each step compiles once."""

import contextlib
import hashlib
import json

import jax
import numpy as np
import pytest
from absl import flags

from absl_apps import flag_parsing, meshes, stopping, train, train_flags, train_program
from absl_apps.checkpoints import Checkpoints
from gradaccum import audit

TINY = (
    *("--d_model=16", "--n_layer=1", "--n_head=2", "--seq_len=16", "--global_batch=16"),
    *("--microbatches=2", "--steps=6", "--learning_rate=0.03", "--compute_dtype=float32"),
    *("--eval_fraction=0", "--checkpoint_every=2"),
)
# What the compiled program does not depend on.
_NOT_OF_THE_STEP = {
    *("workdir", "data", "eval_data", "eval_fraction", "eval_every", "eval_sequences", "seed"),
    *("checkpoint_every", "keep", "on_nonfinite"),
}
_built = {}
_build = train.build


def write_text(directory):
    path = directory / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 50)
    return path


def parse(*args):
    values = flags.FlagValues()
    train_flags.parse(["train", *TINY, *args], values, manual="The manual.")
    return values


def build_once(start, say):
    """`train.build`, which compiles each program once for all runs of this process."""
    of_the_step = {k: v for k, v in start.chosen.items() if k not in _NOT_OF_THE_STEP}
    key = json.dumps(of_the_step, sort_keys=True)
    if key not in _built:
        with pytest.MonkeyPatch.context() as patch:  # other tests look at what is compiled
            patch.setattr(train.audit, "assert_one_reduction", lambda *_, **__: None)
            patch.setattr(train.audit, "collectives", lambda *_, mesh: _none_of(mesh))
            _built[key] = _build(start, say)
    return _built[key]


def _none_of(mesh):
    return audit.Report((), "step", dict(mesh.shape), mesh.size)


def run(workdir, *args, stop=None, **patches):
    """Run the program; return what run.json holds.

    Args:
      workdir: of the run.
      args: flags after TINY.
      stop: the calls after which SIGTERM is heeded.
      patches: what stands for functions of `train`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "build", build_once)
        for name, function in patches.items():
            patch.setattr(train, name, function)
        if stop is not None:
            heard = lambda _, calls: "SIGTERM" if calls == stop else None  # noqa: E731
            patch.setattr(stopping.Signals, "asked", heard)
        return train.train(parse(*args, f"--workdir={workdir}"))


def stopped(workdir, *args, stop):
    """Run the program up to a call; the state is saved there."""
    with pytest.raises(SystemExit) as exit_:
        run(workdir, *args, stop=stop)
    assert exit_.value.code == 0
    assert newest(workdir) == stop


def refused(workdir, *args, match, **patches):
    """Run the program, which is to end with one line; return that."""
    with pytest.raises(SystemExit, match=match) as exit_:
        run(workdir, *args, **patches)
    line = exit_.value.code  # a text: printed, and the exit code is 1
    assert line.startswith("train: ")
    assert "\n" not in line
    return line


######################################### What runs leave ########################################


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def lines(workdir):
    """The lines of metrics.jsonl as text, but for the one number that is of the clock."""
    found = metrics(workdir)
    for line in found:
        assert line.pop("tokens_per_second") > 0
    return [json.dumps(line) for line in found]


def losses(workdir):
    return [line["loss"] for line in metrics(workdir)]


def saved_calls(workdir):
    names = [path.name for path in (workdir / "checkpoints").iterdir()]
    return sorted(int(name) for name in names)  # nothing else is there


def newest(workdir):
    return saved_calls(workdir)[-1]


def program(*args):
    """What a run with these flags computes."""
    values = parse(*args)
    mesh = meshes.make(meshes.parse(values.mesh or "dp=8"), "--mesh")
    return train_program.describe(flag_parsing.chosen(values, train_flags.GROUPS), mesh)


def state(workdir, *args, call=None):
    """The state in a checkpoint, on the host: bytes of each leaf, by its path."""
    call = newest(workdir) if call is None else call
    tree = Checkpoints(str(workdir / "checkpoints"), keep=1).restore(call, program(*args).state)
    found, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): host(x) for path, x in found}


def host(x):
    if x.dtype == jax.dtypes.float0:
        return np.zeros(x.shape, bool)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def assert_same_bits(got, want, but=()):
    """Asserts two `state`s equal to the last bit, but for leaves whose path holds one of `but`."""
    assert got.keys() == want.keys()
    differing = [
        path
        for path in want
        if got[path].tobytes() != want[path].tobytes() and not any(name in path for name in but)
    ]
    assert not differing, differing


def contents(workdir):
    """All files with their contents' hashes."""
    return {
        str(path.relative_to(workdir)): path.is_file()
        and hashlib.sha256(path.read_bytes()).hexdigest()
        for path in workdir.rglob("*")
    }


@contextlib.contextmanager
def unchanged(workdir):
    """Asserts that nothing is added, removed or changed in a directory."""
    before = contents(workdir)
    yield
    assert contents(workdir) == before
