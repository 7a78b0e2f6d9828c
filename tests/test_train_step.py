"""The training program's step: the gradient of the full batch, and the same steps at each stage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from absl_apps import meshes, optimizers, transformer
from absl_apps.train_setup import Setup
from absl_apps.train_state import describe_state, init_state
from absl_apps.train_step import make_step
from gradaccum import audit

ADAMW = optimizers.make_optimizer("adamw", optax.constant_schedule(0.02))


@pytest.fixture(scope="module")
def full_batch():
    """Config, parameters, tokens, and the plain loss and gradient of all of them at once."""
    config = transformer.Config(16, 2, 2, "float32")
    params = transformer.init(jax.random.key(0), config)
    params["head"] += 0.1 * jax.random.normal(jax.random.key(1), params["head"].shape)
    tokens = np.random.default_rng(0).integers(0, 256, (16, 9), dtype=np.uint8)
    value_and_grad = jax.jit(jax.value_and_grad(transformer.loss), static_argnums=2)
    # Copies on the host: the step donates the parameters.
    return config, *jax.tree.map(np.array, (params, tokens, value_and_grad(params, tokens, config)))


def started(params, setup):
    """The first state, with these parameters, laid out; and how that is."""
    described = describe_state(setup)
    state = jax.eval_shape(lambda: init_state(jax.random.key(0), setup))
    state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state)._replace(params=params)
    return jax.device_put(state, jax.tree.map(lambda x: x.sharding, described)), described


def batch_of(tokens):
    return {"tokens": tokens, "mask": np.ones((len(tokens), tokens.shape[1] - 1), bool)}


@pytest.mark.parametrize(("devices", "microbatches"), [(8, 2), (2, 4)])
def test_step_applies_the_full_batch_gradient(full_batch, devices, microbatches):
    config, params, tokens, (loss, grads) = full_batch
    setup = Setup(config, meshes.make({"dp": devices}, ""), optax.sgd(1.0))
    state, described = started(params, setup)
    step = make_step(setup, microbatches, described)  # the step is then params - gradient
    state, measured = step(state, batch_of(tokens), 0)
    np.testing.assert_allclose(measured["loss"], loss, rtol=1e-5)
    norm = optax.tree.norm(grads)
    np.testing.assert_allclose(measured["gradient_norm"], norm, rtol=1e-4)
    applied = jax.tree.map(lambda before, after: before - np.array(after), params, state.params)
    jax.tree.map(
        lambda a, g: np.testing.assert_allclose(a, g, rtol=1e-4, atol=2e-6), applied, grads
    )


@pytest.mark.parametrize("mesh", ["dp=8", "replica=2,fsdp=4"])
@pytest.mark.parametrize("zero", range(4))
def test_every_stage_takes_the_same_steps(full_batch, reference_losses, zero, mesh):
    config, params, tokens, _ = full_batch
    mesh = meshes.make(meshes.parse(mesh), f"--mesh={mesh}")
    setup = Setup(config, mesh, ADAMW, zero)
    state, described = started(params, setup)
    lies = {
        name: {str(x.sharding.spec) for x in jax.tree.leaves(getattr(described, name))}
        for name in ("params", "opt_state")
    }
    axis = mesh.axis_names[-1]
    whole, both = {str(P())}, {str(P()), str(P(axis)), str(P(None, axis))}
    assert lies["params"] == (both if zero == 3 else whole)
    assert lies["opt_state"] == (both if zero else whole)

    tokens = batch_of(tokens)
    step = make_step(setup, 2, described).lower(state, tokens, np.int32(0)).compile()
    report = audit.assert_one_reduction(step, axis_name=mesh.axis_names, mesh=mesh)
    kinds = {row.kind for row in audit.collectives(step, mesh=mesh) if row.bytes > 4096}
    scattered = {"reduce-scatter"} | ({"all-reduce"} if len(mesh.axis_names) > 1 else set())
    assert kinds >= ({"all-gather"} if zero else set()), report
    assert kinds - {"all-gather"} == ({"all-reduce"} if zero < 2 else scattered)
    found = []
    for call in range(len(reference_losses)):
        state, measured = step(state, tokens, np.int32(call))  # it comes out as it went in
        found.append(float(measured["loss"]))
    np.testing.assert_allclose(found, reference_losses, rtol=1e-4)
    assert found[-1] < found[0] - 0.1


@pytest.fixture(scope="module")
def reference_losses(full_batch):
    """Four steps on one device, without gradaccum."""
    config, params, tokens, _ = full_batch
    opt_state, found = ADAMW.init(params), []
    value_and_grad = jax.jit(jax.value_and_grad(transformer.loss), static_argnums=2)
    for _ in range(4):
        loss, grads = value_and_grad(params, tokens, config)
        updates, opt_state = ADAMW.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        found.append(float(loss))
    return found
