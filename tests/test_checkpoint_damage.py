"""Checkpoints whose files were damaged: an error that names them, and nothing is touched."""

import os
import pathlib
import shutil

import helpers
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import assert_same, like, small

from absl_apps.checkpoints import Checkpoints


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A directory of the checkpoints 3 and 4, and the state of 4."""
    directory = tmp_path_factory.mktemp("two")
    with Checkpoints(directory, keep=2) as checkpoints:
        for call in (3, 4):
            state = small(helpers.data_mesh(8), call)
            checkpoints.save(call, state, {})
    return directory, state


def flip(path, place=None):
    held = bytearray(path.read_bytes())
    held[len(held) // 2 if place is None else place] ^= 4
    path.write_bytes(held)


DAMAGES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "first bits": lambda path: flip(path, 0),
    "a bit": flip,
    "last bits": lambda path: flip(path, -1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}
UNREAD = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # Orbax's own: nothing of the run


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_an_error(two, tmp_path, damage):
    directory, state = two
    names = [path.relative_to(directory) for path in (directory / "4").rglob("*") if path.is_file()]
    assert len(names) > 10
    for i, name in enumerate(names):
        copy = tmp_path / str(i)
        shutil.copytree(directory, copy)
        DAMAGES[damage](copy / name)
        held = {path: path.is_file() and path.read_bytes() for path in copy.rglob("*")}
        checkpoints = Checkpoints(copy, keep=1)
        if name.name in UNREAD and damage not in ("missing", "a directory"):
            assert_same(checkpoints.restore(checkpoints.latest(), like(state)), state)
            continue
        for read in (
            checkpoints.latest,
            lambda: checkpoints.facts(4),  # noqa: B023
            lambda: checkpoints.restore(4, like(state)),  # noqa: B023
        ):
            with pytest.raises(ValueError, match="; move it away, and the run goes on ") as error:
                read()
            message = str(error.value)
            assert message.startswith(f"--workdir: {copy}/4: {name.relative_to('4')}")
            assert message.endswith(" from that of call 3.")
            assert "\n" not in message
        assert held == {path: path.is_file() and path.read_bytes() for path in copy.rglob("*")}


def test_a_bit_flipped_in_a_large_array_names_it(tmp_path):
    x = np.random.default_rng(0).normal(size=2**19).astype(np.float32)
    state = {"a": jnp.ones(3), "large": [jnp.asarray(x), jnp.zeros(4)]}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(4, state, {})
        checkpoints.wait()
        (path,) = (p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size > 2**20)
        found, size = 0, path.stat().st_size
        for place in [*range(0, size, size // 20), *range(1, 200, 20), size - 1]:
            flip(path, place)
            try:  # a few bytes belong to nothing
                assert_same(checkpoints.restore(4, like(state)), state)
            except ValueError as error:
                assert "there is none before it: move it away" in str(error)  # noqa: PT017
                found += "['large'][0]: not the bits that were saved" in str(error)
            flip(path, place)
        assert found >= 20
        assert_same(checkpoints.restore(4, like(state)), state)


def make_file(path):
    path.write_text("not a checkpoint")


@pytest.mark.parametrize(
    ("make", "said"),
    [(pathlib.Path.mkdir, "files.json is missing"), (make_file, "is not a directory")],
)
def test_what_is_named_like_a_checkpoint_is_not_passed_over(two, tmp_path, make, said):
    copy = tmp_path / "copy"
    shutil.copytree(two[0], copy)
    make(copy / "5")
    with pytest.raises(ValueError, match=rf"/5: {said}; .* from that of call 4\.$"):
        Checkpoints(copy, keep=1).latest()
    assert sorted(os.listdir(copy)) == ["3", "4", "5"]
    os.rename(copy / "5", copy / "away")  # as it says
    assert Checkpoints(copy, keep=1).latest() == 4
