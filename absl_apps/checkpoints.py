"""Checkpoints of a run: written in the background by Orbax, whole or not there, and proven.

A checkpoint is a directory named after its call: the arrays as Orbax writes them, `facts.json`
(the run's facts; each array's path, shape, dtype and fingerprint) and `files.json` (the files).
It is written under another name and gets its own in one move, when all of it is on the disk.
What is restored has the bits of what was saved, or is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from absl_apps import checkpoint_files, checkpoint_leaves, fingerprints, orbax_arrays, whole_writes

FACTS = "facts.json"


class Checkpoints:
    """The checkpoints in a directory, of which the newest `keep` stay.

    Where there are several processes, all make this object on one shared directory, and all call
    `save`, `wait`, `restore` and `close`, in the same order. If one of them fails there, it
    raises at once, and the others wait for it, in vain: end the process, as
    `cluster.ending_together` does, and they end too.

    Args:
      directory: of the checkpoints, made at the first `save`. What a killed process left half
        written in it is removed here.
      keep: how many stay, at least 1. One more is there until the next `save` or `wait`, as an
        older one goes only when a newer one is whole.

    Raises:
      ValueError: of a directory that cannot be read.
    """

    def __init__(self, directory: str, *, keep: int):
        if keep < 1:
            raise ValueError(f"Checkpoints: keep is {keep}; at least 1 must stay.")
        self.directory, self.keep = os.path.abspath(directory), keep
        self._writer: orbax_arrays.Writer | None = None
        self._writing: _Writing | None = None
        if jax.process_index() == 0:
            with self._disk():
                self._sweep()

    ############################################ Reading ###########################################

    def latest(self) -> int | None:
        """Return the call of the newest checkpoint, or None if there is none.

        Raises:
          ValueError: if that one is not whole: it lacks files, or they are garbled; as `wait`.
        """
        self.wait()
        with self._disk():
            calls = checkpoint_files.calls_in(self.directory)
        if not calls:
            return None
        self._check_files(calls[-1])
        return calls[-1]

    def facts(self, call: int) -> dict[str, Any]:
        """Return the facts that were saved with a call.

        Raises:
          ValueError: if there is no such checkpoint, or it is not whole.
        """
        return self._record(call)["facts"]

    def restore(self, call: int, like: Any) -> Any:
        """Return the state that was saved after a call, to the last bit.

        Args:
          call: of a checkpoint.
          like: a tree of `jax.ShapeDtypeStruct` with the shardings wanted, or of arrays. The mesh
            may be another than the saved state's.

        Returns:
          The tree, of arrays with these shardings.

        Raises:
          ValueError: if the saved state has other leaves, before anything of it is read; if a file
            is missing or garbled; if an array has not the bits that were saved.

        Cost: each process reads its part of each array; then one pass over them on the devices.
        """
        self.wait()
        saved = checkpoint_leaves.from_json(self._record(call)["leaves"])
        needed, tree = checkpoint_leaves.of(like)
        unlike = checkpoint_leaves.unlike(saved, needed)
        if unlike:
            raise ValueError(
                f"--workdir: {self._path(call)} is of another state: "
                f"{checkpoint_leaves.first(unlike)}. "
                f"Run with the flags that it was saved with, or choose another --workdir."
            )
        for old, new in zip(saved, needed, strict=True):
            old.sharding = new.sharding
        pairs = zip(saved, self._read(call, saved), strict=True)
        return jax.tree.unflatten(tree, [leaf.restored(array) for leaf, array in pairs])

    def _read(self, call: int, leaves: Sequence[checkpoint_leaves.Leaf]) -> list[jax.Array]:
        """Returns the arrays of a checkpoint, with the bits that were saved."""
        try:
            arrays = orbax_arrays.read(self._path(call), [leaf.words for leaf in leaves])
        except Exception as error:  # of many kinds, as the files may hold anything
            raise self._error(call, f"cannot be read: {orbax_arrays.reason(error)}") from error
        found = fingerprints.numbers(fingerprints.fingerprints(arrays))
        pairs = zip(leaves, found, strict=True)
        wrong = [leaf.path for leaf, number in pairs if leaf.fingerprint != number]
        if wrong:
            what = f"{checkpoint_leaves.first(wrong)}: not the bits that were saved"
            raise self._error(call, what)
        return arrays

    def _record(self, call: int) -> dict[str, Any]:
        self._check_files(call)
        with self._disk(), open(os.path.join(self._path(call), FACTS), encoding="utf-8") as stream:
            return json.load(stream)

    def _check_files(self, call: int) -> None:
        if not os.path.lexists(self._path(call)):
            there = ", ".join(map(str, checkpoint_files.calls_in(self.directory))) or "none"
            raise ValueError(f"--workdir: {self._path(call)} is not there; there are: {there}.")
        wrong = checkpoint_files.broken(self._path(call))
        if wrong:
            raise self._error(call, wrong)

    ############################################ Writing ###########################################

    def save(self, call: int, state: Any, facts: Mapping[str, Any]) -> None:
        """Save the state after a call; return once it is copied, and may be donated.

        Args:
          call: greater than that of any checkpoint there.
          state: a tree of arrays; where there are several processes, on a mesh of all.
          facts: of JSON; process 0's are kept.

        Raises:
          ValueError: if this or the write before it failed, say because the disk is full; what
            was whole is still there. If there is such a call, or a later one.
          TypeError: if a leaf is not such an array, or facts are not JSON.

        Cost: waits for the write before it. Copies the state to the host, if it is not there.
        """
        self.wait()
        leaves, _ = checkpoint_leaves.of(state)
        pairs = zip(leaves, jax.tree.leaves(state), strict=True)
        arrays = [leaf.written(x) for leaf, x in pairs]
        text = json.dumps(facts)
        with self._disk():
            newest = max(checkpoint_files.calls_in(self.directory), default=-1)
        if call <= newest:
            raise ValueError(
                f"--workdir: {self.directory} has a checkpoint of call {newest}; that of call "
                f"{call} would not be the newest. Choose another --workdir."
            )
        # Read when the write ends: that the devices are done is not waited for here.
        self._writing = _Writing(call, text, leaves, fingerprints.fingerprints(arrays))
        with self._written(call):
            if self._writer is None:
                os.makedirs(self.directory, exist_ok=True)
                self._writer = orbax_arrays.Writer(self._finish)
            self._writer.start(self._path(call), arrays)

    def _finish(self) -> None:
        """Writes what is beside the arrays; then Orbax gives the directory its name."""
        assert self._writing is not None
        writing = self._writing
        half_written = checkpoint_files.half_written_in(self.directory)
        (partial,) = (x for x in half_written if x.startswith(f"{self._path(writing.call)}."))
        for leaf, number in zip(writing.leaves, fingerprints.numbers(writing.started), strict=True):
            leaf.fingerprint = number
        leaves = json.dumps([leaf.json() for leaf in writing.leaves])
        text = f'{{"facts": {writing.facts}, "leaves": {leaves}}}'
        checkpoint_files.write(os.path.join(partial, FACTS), text)
        checkpoint_files.seal(partial)

    def wait(self) -> None:
        """Return once the last `save` is on the disk, and older checkpoints are removed.

        Raises:
          ValueError: if it failed; what was whole is still there.
        """
        if self._writing is None:
            return
        assert self._writer is not None
        with self._written(self._writing.call):
            self._writer.wait()
        self._writing = None
        if jax.process_index() == 0:
            with self._disk():
                whole_writes.sync_directory(self.directory)
                for call in checkpoint_files.calls_in(self.directory)[: -self.keep]:
                    self._remove(self._path(call))

    def close(self) -> None:
        """Wait, and let go of all threads; another `save` may follow.

        Raises:
          ValueError: as `wait`.
        """
        try:
            self.wait()
        finally:
            self._forget()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        elif jax.process_count() == 1:  # where there are several, the write may wait for ever
            with contextlib.suppress(ValueError):  # the first error is told
                self.close()

    def _forget(self) -> None:
        writer, self._writer, self._writing = self._writer, None, None
        if writer is not None:
            writer.close()

    ############################################# Files ############################################

    def _path(self, call: int) -> str:
        return os.path.join(self.directory, str(call))

    def _sweep(self) -> None:
        """Removes what is not whole."""
        for path in checkpoint_files.half_written_in(self.directory):
            shutil.rmtree(path)

    def _remove(self, path: str) -> None:
        """Removes a checkpoint; killed in the middle, none is seen."""
        gone = f"{path}.removed"
        os.rename(path, gone)
        shutil.rmtree(gone)

    ############################################ Errors ############################################

    def _error(self, call: int, what: str) -> ValueError:
        """Returns the error of a checkpoint that is not what was saved."""
        before = self._whole_before(call)
        remedy = f"move it away, and the run goes on from that of call {before}"
        if before is None:
            remedy = "there is none before it: move it away, or choose another --workdir"
        return ValueError(f"--workdir: {self._path(call)}: {what}; {remedy}.")

    def _whole_before(self, call: float) -> int | None:
        with contextlib.suppress(OSError):
            for other in reversed(checkpoint_files.calls_in(self.directory)):
                if other < call and checkpoint_files.broken(self._path(other)) is None:
                    return other
        return None

    @contextlib.contextmanager
    def _written(self, call: int) -> Iterator[None]:
        """Makes any error of a write one line, after which the next write starts afresh."""
        try:
            yield
        except Exception as error:  # of many kinds: Python's, and text of native code
            self._forget()
            with contextlib.suppress(OSError):
                if jax.process_count() == 1:  # else others may still write
                    self._sweep()
            last = self._whole_before(float("inf"))
            kept = "there is none" if last is None else f"the newest whole one is of call {last}"
            raise ValueError(
                f"--workdir: {self._path(call)} could not be written: "
                f"{orbax_arrays.reason(error)}; {kept}. "
                "Mend that, and start again with the same flags."
            ) from error

    @contextlib.contextmanager
    def _disk(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            path = error.filename or self.directory
            raise ValueError(f"--workdir: {path}: {error.strerror}.") from error


@dataclasses.dataclass
class _Writing:
    """What a write in the background still needs at its end."""

    call: int
    facts: str
    leaves: list[checkpoint_leaves.Leaf]
    started: list[tuple[list[int], jax.Array]]  # fingerprints
