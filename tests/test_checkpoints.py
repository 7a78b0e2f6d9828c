"""Checkpoints: the bits that were saved come back, or there is an error."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint_states import MESHES, assert_same, like, put, small
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from absl_apps.checkpoints import Checkpoints

############################################ The bits ############################################


def every_kind(mesh):
    params = {"w": put(jnp.arange(16.0).reshape(8, 2), mesh), "b": put(jnp.ones(8), mesh, "dp")}
    tx = gradaccum.MultiSteps(optax.adam(1e-3), 2, axis_name="dp")
    with jax.set_mesh(mesh):
        opt_state = tx.init(params)
        loss = lambda params, x: jnp.mean(x @ params["w"]) + params["b"].sum()  # noqa: E731
        step = gradaccum.unreduced_value_and_grad(loss, microbatches=1, axis_name="dp")
        _, grads = jax.jit(step)(params, put(jnp.ones((8, 8)), mesh, "dp"))
    nan = np.array([0x7FC00001, 0xFFC12345], np.uint32).view(np.float32)  # which NaN, is kept
    return {
        "opt_state": opt_state,
        "grads": grads,
        "keys": put(jax.random.split(jax.random.key(1), 8), mesh, "dp"),
        "rbg": put(jax.random.key(2, impl="rbg"), mesh),
        "raw": jax.random.PRNGKey(3),
        "empty": [(), None, jnp.zeros((0, 3)), jnp.zeros((3, 0), jnp.int8)],
        "special": [jnp.asarray(nan), jnp.array([-0.0, jnp.inf])],
        "scalars": [jnp.array(True), jnp.int32(-4), jnp.bfloat16(0.1)],
        "small": [jnp.arange(6, dtype=x) for x in ("int4", "uint8", "float8_e4m3fn", "float16")],
        "wide": [jnp.ones(3, jnp.complex64), put(jnp.arange(8) % 3 == 0, mesh, "dp")],
    }


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_every_kind_of_leaf_comes_back(tmp_path, axis_type):
    mesh = helpers.data_mesh(8, jax.sharding.AxisType[axis_type])
    auto = axis_type == "Auto"
    state = (
        every_kind(mesh) if auto else {"w": put(jnp.ones((8, 2)), mesh, "dp"), "n": jnp.int32(1)}
    )
    with Checkpoints(tmp_path / "new" / "er", keep=1) as checkpoints:
        assert checkpoints.latest() is None
        checkpoints.save(7, state, {"loss": 0.1, "position": [1, {"a": None}]})
        assert_same(checkpoints.restore(7, like(state)), state)
        assert checkpoints.latest() == 7
        assert checkpoints.facts(7) == {"loss": 0.1, "position": [1, {"a": None}]}
    with Checkpoints(tmp_path / "new" / "er", keep=1) as checkpoints:
        assert_same(checkpoints.restore(7, state), state)


@pytest.mark.parametrize("there", MESHES)
@pytest.mark.parametrize("here", ["eight", "four by two"])
def test_a_state_is_restored_on_another_mesh(tmp_path, here, there):
    models = ["mp" if name == "four by two" else None for name in (here, there)]
    saved, needed = (
        small(MESHES[name](), 5, model) for name, model in zip((here, there), models, strict=True)
    )
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, saved, {})
        assert_same(checkpoints.restore(1, like(needed)), needed)


def test_a_state_may_be_donated_as_soon_as_it_is_saved(tmp_path):
    mesh = helpers.data_mesh(8)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("dp"))
    wheres = (21, split), (17, whole), (21, jax.devices()[0])  # of 64, 4 and 64 MB
    state = [jax.device_put(np.zeros((8, 2**n), np.float32), where) for n, where in wheres]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    step = lambda state: [add(x) for x in state]  # noqa: E731
    with Checkpoints(tmp_path, keep=9) as checkpoints:
        for call in range(1, 4):
            state = step(state)
            checkpoints.save(call, state, {})
            state = step(step(state))  # over the same memory, while it is written
            jax.block_until_ready(state)
        for call in range(1, 4):
            for x in checkpoints.restore(call, like(state)):
                found = np.asarray(x)
                assert found.min() == found.max() == 3 * call - 2


############################################ Mistakes ############################################


def test_a_state_of_another_model_is_refused_before_it_is_read(tmp_path):
    mesh = helpers.data_mesh(8)
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, small(mesh), {})
        other = small(mesh) | {"w": jnp.ones((8, 4), jnp.bfloat16), "new": [jnp.int32(1)] * 9}
        del other["n"]
        with pytest.raises(ValueError, match="is of another state") as error:
            checkpoints.restore(1, like(other))
        assert str(error.value) == (
            f"--workdir: {tmp_path}/1 is of another state: ['n'] int32[] is not needed, "
            "['w'] is float32[8, 8], needed bfloat16[8, 4], ['new'][0] int32[] is not in it, "
            "['new'][1] int32[] is not in it, ['new'][2] int32[] is not in it, and 6 more. "
            "Run with the flags that it was saved with, or choose another --workdir."
        )
        rbg = small(mesh) | {"key": jax.random.key(0, impl="rbg")}
        with pytest.raises(ValueError, match=r"\['key'\] is key<fry>\[\], needed key<rbg>\[\]"):
            checkpoints.restore(1, like(rbg))


def test_what_is_there_is_not_overwritten(tmp_path):
    state = {"x": jnp.ones(3)}
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, state, {})
        for call in (5, 4, -1):
            with pytest.raises(ValueError, match=rf"of call 5; that of call {call} would not be"):
                checkpoints.save(call, state, {})
        with pytest.raises(ValueError, match=r"/6 is not there; there are: 5\."):
            checkpoints.facts(6)
        with pytest.raises(TypeError, match=r"state\['x'\] is a float; give a jax.Array"):
            checkpoints.save(6, {"x": 1.0}, {})
        with pytest.raises(TypeError, match="not JSON"):
            checkpoints.save(6, state, {"x": state})
    with pytest.raises(ValueError, match="keep is 0; at least 1"):
        Checkpoints(tmp_path, keep=0)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--workdir: .*/file: Not a directory\."):
        Checkpoints(tmp_path / "file", keep=1)


def test_the_newest_stay_and_what_is_not_a_checkpoint_does(tmp_path):
    (tmp_path / "notes.txt").touch()
    for name in ("9.orbax-checkpoint-tmp", "8.removed"):
        (tmp_path / name / "d").mkdir(parents=True)
        (tmp_path / name / "d" / "half").touch()
    seen = lambda: sorted(path.name for path in tmp_path.iterdir())  # noqa: E731
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert seen() == ["notes.txt"]
        for call in (3, 9, 10, 11):
            checkpoints.save(call, {"x": jnp.ones(3)}, {})
        checkpoints.wait()
        assert seen() == ["10", "11", "notes.txt"]
