"""Data files that tests write and open."""

import numpy as np

from absl_apps import corpus


def opened(*files, max_bytes=None, vocab_size=None, document_end=None):
    given = {"max_bytes": max_bytes, "vocab_size": vocab_size, "document_end": document_end}
    return corpus.open_corpus([str(file) for file in files], **given)


def written(directory, contents):
    """Writes each content, bytes or a list of tokens, to a file of its own; returns the files."""
    files = []
    for i, content in enumerate(contents):
        text = isinstance(content, bytes)
        files.append(directory / f"{i}.{'txt' if text else 'bin'}")
        files[-1].write_bytes(content if text else np.asarray(content, "<u2").tobytes())
    return files


def numbered(directory):
    """Returns 1,003 tokens, each its own position: 100 sequences of 10 targets, and one of 2."""
    return opened(*written(directory, [range(1003)]), vocab_size=2000)


def positions(batch):
    """Returns which sequences of `numbered` the rows of a batch are."""
    return (batch["tokens"][:, 0] // 10).tolist()
