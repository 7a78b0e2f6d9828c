"""Norms written down wrongly (T7, T8), and what the library's say of wrong arguments."""

import helpers
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from model_axis import modes
from norm_runs import SPECS, clip_of, norm_of, optax_clip, run, tree_of

from gradaccum.tensor_parallel import clip_by_global_norm, global_norm, reduce_from

# --- T7, T8: the same, written down wrongly ------------------------------------------------------

ONES = {"up": np.ones((3, 8), np.float32), "norm": np.ones(12, np.float32)}  # a norm of 6
WRONG = {
    "each device's own": (lambda square: square, 18**0.5),
    "T7: a psum of all": (lambda square: reduce_from(square, "mp"), 72**0.5),
    "T8: a mean of all": (lambda square: reduce_from(square, "mp") / 4, 18**0.5),
}


@pytest.mark.parametrize("case", WRONG)
def test_t7_t8_wrong_norms(case):
    combine, value = WRONG[case]
    specs = {"up": P(None, "mp"), "norm": P()}
    wrong = run(lambda t: jnp.sqrt(combine(optax.tree.norm(t, squared=True))), ONES, specs, P())
    np.testing.assert_allclose(wrong, value, rtol=1e-6)
    np.testing.assert_allclose(norm_of(ONES, specs), 6, rtol=1e-6)


@modes
def test_optaxs_own_clip_inside_makes_replicated_leaves_diverge(typed):
    """One shard is large: the replicated leaf is scaled differently on each device."""
    tree = {"up": np.ones((3, 8), np.float32), "norm": np.ones(3, np.float32)}
    tree["up"][:, 0] = 100
    specs = {"up": P(None, "mp"), "norm": P()}

    def copies(clip):
        def fun(g):
            return clip.update(g, clip.init(g))[0]["norm"][None]

        return run(fun, tree, specs, P("mp"), typed=False)

    own = copies(optax.clip_by_global_norm(1.0))
    assert np.ptp(own, axis=0).max() > 0.1
    ours = copies(clip_by_global_norm(1.0, specs, "mp"))
    np.testing.assert_array_equal(ours, np.broadcast_to(ours[:1], ours.shape))
    helpers.assert_close(clip_of(tree, 1.0, specs, typed=typed), optax_clip(tree, 1.0))


# --- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", [norm_of, clip_of], ids=["global_norm", "clip_by_global_norm"])
def test_errors_name_the_function(api):
    name = "global_norm" if api is norm_of else "clip_by_global_norm"

    def message(error, specs, axis_name="mp", typed=False):
        def fun(tree):
            if api is norm_of:
                return global_norm(tree, specs, axis_name)
            return clip_by_global_norm(1.0, specs, axis_name).update(tree, optax.EmptyState())[0]

        with pytest.raises(error) as caught:
            run(fun, tree_of(), out_specs=P(), typed=typed)
        return str(caught.value)

    assert f"{name}: got axis_name='tp', needed" in message(ValueError, SPECS, "tp")
    assert f"{name}: got axis_name=('mp', 'mp'), needed" in message(ValueError, SPECS, ("mp", "mp"))
    missing = {n: s for n, s in SPECS.items() if n != "up"}
    text = message(ValueError, missing)
    assert text.startswith(f"{name}: specs is not a pytree prefix of its argument: it has nothing")
    assert "['up']" in text
    assert f"{name}: specs holds 'mp'; its leaves must be" in message(
        TypeError, SPECS | {"up": "mp"}
    )
    text = message(ValueError, SPECS | {"up": P(), "down": P(None)}, typed=True)
    assert text == (
        f"{name}: ['down'] (2, 3) differs over mp, its spec is {P(None)}; ['up'] (3, 2) differs "
        f"over mp, its spec is {P()}. Give specs as the arrays lie: those of the in_specs."
    )


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), None, "1", 1j], ids=repr)
def test_max_norm(value):
    with pytest.raises(ValueError, match="clip_by_global_norm") as caught:
        clip_by_global_norm(value, SPECS, "mp")
    assert str(caught.value) == (
        f"clip_by_global_norm: max_norm is {value!r}; it must be a number > 0."
    )
