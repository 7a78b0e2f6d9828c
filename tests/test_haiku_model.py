"""The second seed's model: whole or sharded it is one, initialised alike for every mesh."""

import functools
import math

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import haiku_model
from absl_apps.layers import PLAIN, sharded

CONFIG = haiku_model.Config(vocabulary=12, d_model=8, n_layer=2)
SPECS = haiku_model.specs(CONFIG, "mp")
TOKENS = np.random.default_rng(0).integers(0, 12, (4, 6), dtype=np.uint8)

jit = functools.partial(jax.jit, compiler_options=helpers.COMPILE_FAST)


def mesh_of(m):
    return jax.make_mesh((m,), ("mp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:m])


@functools.cache
def params():
    return jit(lambda: haiku_model.init(jax.random.key(0), CONFIG))()


def sharded_gradients(m, typed=False, config=CONFIG):
    def fun(p, tokens):
        return haiku_model.loss(p, tokens, config, sharded("mp"))

    specs = haiku_model.specs(config, "mp")
    return jax.shard_map(
        jax.value_and_grad(fun),
        mesh=mesh_of(m),
        in_specs=(specs, P()),
        out_specs=(P(), specs),
        check_vma=typed,
    )


def test_whole_it_is_the_model_written_out():
    """An embedding, x + gelu(x up + b) down + b twice, a projection; in NumPy but for gelu."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params())
    x = p["embedding"]["table"][TOKENS[:, :-1]]
    for name in "feed_forward", "feed_forward_1":
        q = p[name]
        h = x @ q["up"] + q["up_bias"][None, None]
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + h @ q["down"] + q["down_bias"][None, None]
    logits = x @ p["projection"]["w"] + p["projection"]["b"][None, None]
    log_z = np.log(np.sum(np.exp(logits), axis=-1))
    picked = np.take_along_axis(logits, TOKENS[:, 1:, None].astype(int), axis=-1)[..., 0]
    got = jit(lambda p: haiku_model.loss(p, TOKENS, CONFIG))(params())
    np.testing.assert_allclose(got, np.mean(log_z - picked), rtol=1e-5)


def test_the_default_sizes_are_the_seeds():
    shapes = jax.eval_shape(lambda: haiku_model.init(jax.random.key(0), haiku_model.Config()))
    assert jax.tree.map(lambda x: x.shape, shapes) == {
        "embedding": {"table": (256, 128)},
        "feed_forward": (layer := {
            "up": (128, 512),
            "up_bias": (512,),
            "down": (512, 128),
            "down_bias": (128,),
        }),
        "feed_forward_1": layer,
        "projection": {"w": (128, 256), "b": (256,)},
    }  # fmt: skip


def test_biases_do_not_start_at_zero():
    """A bias that is added m times would not show."""
    for name, leaf in jax.tree_util.tree_leaves_with_path(params()):
        assert np.all(np.std(leaf) > 0.01), name


@pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])
@pytest.mark.parametrize("m", [1, 2, 4])
def test_whole_and_sharded_are_one_model(m, typed):
    with jax.enable_x64(True):
        config = haiku_model.Config(12, 8, 2, "float64")
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params())
        got = jit(sharded_gradients(m, typed, config))(wide, TOKENS)
        fun = jax.value_and_grad(lambda p: haiku_model.loss(p, TOKENS, config, PLAIN))
        want = jit(fun)(wide)
        helpers.assert_close(got, want)
    assert all(np.max(np.abs(x)) > 1e-3 for x in jax.tree.leaves(want))  # or nothing is compared


@pytest.mark.parametrize("m", [1, 2, 4])
def test_t11_initialised_in_place_it_does_not_depend_on_the_devices(m):
    where = jax.tree.map(lambda spec: NamedSharding(mesh_of(m), spec), SPECS)
    made = jit(lambda: haiku_model.init(jax.random.key(0), CONFIG), out_shardings=where)()
    jax.tree.map(np.testing.assert_array_equal, made, params())
    assert made["projection"]["w"].sharding.spec == P(None, "mp")
    assert made["projection"]["w"].addressable_shards[0].data.shape == (8, 12 // m)


def test_specs_have_the_parameters_structure():
    for n_layer in 1, 2, 3:
        config = haiku_model.Config(12, 8, n_layer)
        shapes = jax.eval_shape(lambda config=config: haiku_model.init(jax.random.key(0), config))
        specs = haiku_model.specs(config, "mp")
        assert jax.tree.structure(shapes) == jax.tree.structure(specs)


def test_dtype_is_that_of_parameters_and_computation():
    config = haiku_model.Config(12, 8, 2, "bfloat16")
    shapes = jax.eval_shape(lambda: haiku_model.init(jax.random.key(0), config))
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype("bfloat16")}
    loss = jax.eval_shape(lambda p: haiku_model.loss(p, TOKENS, config), shapes)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)


############################################ Mistakes ############################################


@pytest.mark.parametrize(
    ("sizes", "shards", "message"),
    [
        ((250, 128), 4, r"4 devices along mp: vocabulary = 250: pad it to 252\.$"),
        (
            (256, 100),
            3,
            r"3 devices .* = 4 \* 100 = 400 hidden .* d_model = 102; .* pad it to 258\.",
        ),
        (
            (6, 1),
            3,
            r"3 devices along mp: 4 \* d_model = 4 \* 1 = 4 hidden .*: take d_model = 3\.$",
        ),
    ],
    ids=["vocabulary", "both", "hidden"],
)
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(sizes, shards, message):
    with pytest.raises(ValueError, match=message):
        haiku_model.check_shards(haiku_model.Config(*sizes), shards, "mp")


def test_sizes_that_divide_are_not_refused():
    for shards in 1, 2, 4, 8, 256:
        haiku_model.check_shards(haiku_model.Config(), shards, "mp")


def test_t16_a_loss_whose_vocabulary_does_not_divide_is_refused_before_it_is_computed():
    """The parameters are those of 12 columns, so that nothing else could see the 13."""
    config = haiku_model.Config(13, 8, 2)
    with pytest.raises(ValueError, match=r"2 devices along mp: vocabulary = 13: pad it to 14"):
        jax.eval_shape(sharded_gradients(2, config=config), params(), TOKENS)


@pytest.mark.parametrize("sizes", [(0, 8, 2), (12, 0, 2), (12, 8, 0)])
def test_a_size_of_zero_is_refused(sizes):
    with pytest.raises(ValueError, match=r"haiku_model: every size must be at least 1, got .*=0"):
        haiku_model.Config(*sizes)
