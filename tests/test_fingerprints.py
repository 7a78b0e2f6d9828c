"""Fingerprints: of all bits of an array, and of nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_states import MESHES, put

from absl_apps import fingerprints


def fingerprint(x):
    (number,) = fingerprints.numbers(fingerprints.fingerprints([x]))
    return number


def test_a_fingerprint_is_of_the_bits_and_not_of_the_layout():
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    found = {
        fingerprint(put(x, MESHES[name](), *spec))
        for name, *spec in (
            ["one"],
            ["eight", "dp"],
            ["four", None, "dp"],
            ["reversed", "dp"],
            ["four by two", "dp", "mp"],
            ["four by two", ("mp", "dp")],
        )
    }
    assert len(found) == 1
    assert fingerprint(jnp.asarray(x[::-1])) not in found
    assert fingerprint(jnp.asarray(x.T)) not in found


def test_changes_do_not_cancel():
    x = np.ones(4, np.float32)
    signs = [[s if bits >> i & 1 else 1 for i in range(4)] for bits in range(16) for s in (-1, 0)]
    found = {fingerprint(jnp.asarray(x * np.array(s, np.float32))) for s in signs}
    assert len(found) == 31


DTYPES = ["bool", "int8", "uint16", "int32", "bfloat16", "float16", "float32", "complex64"]


@pytest.mark.parametrize("dtype", [*DTYPES, "float64", "complex128", "int64"])
def test_every_bit_is_in_a_fingerprint(dtype):
    with jax.enable_x64(True):
        x = np.zeros(5, jnp.dtype(dtype))
        size, places = x.itemsize, range(0, 8 * x.nbytes, 8 if dtype == "bool" else 1)
        found = {fingerprint(jnp.asarray(x))}
        for bit in places:
            flipped = x.copy()
            flipped.view(np.uint8)[bit // 8] ^= 1 << (bit % 8)
            found.add(fingerprint(jnp.asarray(flipped)))
        assert len(found) == 1 + len(places) == 1 + 5 * (1 if dtype == "bool" else 8 * size)
