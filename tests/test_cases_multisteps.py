"""What optimizers do to dtypes, and `MultiSteps` around them must take."""

import jax
import jax.numpy as jnp
import optax
import pytest

from gradaccum import MultiSteps

PARAMS = {"w": jnp.ones(2, jnp.bfloat16), "none": None}
GRADS = {"w": jnp.full(2, 0.5, jnp.bfloat16), "none": None}


def widen(updates, state, params=None):
    """Returns float32 for bfloat16, in updates and state."""
    del params
    new = jax.tree.map(lambda s, g: s.astype(jnp.float32) + g, state, updates)
    return jax.tree.map(lambda x: -x, new), new


WIDENS = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), widen)


@pytest.mark.parametrize("k", [1, 2])
def test_o21_an_optimizer_may_return_other_dtypes_than_it_is_given(k):
    """All calls return updates of one dtype, and the state is a carry: a scan takes it."""
    tx = MultiSteps(WIDENS, k)
    step = lambda state, _: tx.update(GRADS, state, PARAMS)[::-1]  # noqa: E731
    state, updates = jax.jit(lambda s: jax.lax.scan(step, s, length=4))(tx.init(PARAMS))
    assert (updates["w"].dtype, updates["none"]) == (jnp.float32, None)
    assert updates["w"][:, 0].tolist() == ([-0.5, -1, -1.5, -2] if k == 1 else [0, -0.5, 0, -1])
    inner = state.inner_opt_state
    assert (inner["w"].dtype, inner["w"].tolist()) == (jnp.bfloat16, [2 / k] * 2)
    with pytest.raises(TypeError, match="carry"):
        jax.lax.scan(lambda s, _: WIDENS.update(GRADS, s)[::-1], WIDENS.init(PARAMS), length=4)
