"""What must not change the gradients of a sharded model: its layout, keys, transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import parallel_models as models
import pytest
from helpers import assert_close, data_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_models import MESHES, MODELS

import gradaccum
from gradaccum import audit
from gradaccum.tensor_parallel import unstack

MLP, WITHIN, K = MODELS["mlp"], 2e-5, 2
modes = pytest.mark.parametrize("typed", [False, True], ids=["untyped", "typed"])


def compiled(fun, *args):
    return models.jit(jax.value_and_grad(fun)).lower(*args).compile()


def placed(mesh, specs, model=MLP):
    return models.place(models.arrays(model.init(), "float32"), mesh, specs)


def assert_is_reference(got, name="mlp"):
    assert_close(got, models.reference(name), within=WITHIN)


def lies_as(x, mesh, spec):
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


# --- Layouts -------------------------------------------------------------------------------------

# Each matrix is split over dp in the dimension that mp leaves.
FSDP = MLP.specs | {
    "table": P("mp", "dp"),
    "up": P("dp", "mp"),
    "down": P("mp", "dp"),
    "out": P("dp", "mp"),
    "scale": P("dp"),
}


@modes
@pytest.mark.parametrize("mesh", ["2x4", "4x2"])
def test_parameters_sharded_over_data_too(mesh, typed):
    """Gathered and scattered over dp once a call, outside the loop that sums over mp."""
    here = models.mesh_of(mesh)
    options = MLP.options() | {"in_specs": (FSDP,), "mesh": here, "check_vma": typed}
    fun = gradaccum.accumulate(MLP.sharded, microbatches=K, **options)
    params, batch = placed(here, FSDP), models.make_batch()
    program = compiled(fun, params, batch)
    loss, grads = program(params, batch)
    assert_is_reference((loss, grads))
    assert [name for name in FSDP if not lies_as(grads[name], here, FSDP[name])] == []
    report = audit.collectives(program)
    assert {row.executions for row in report.over("dp")} == {1}, str(report)
    kinds = {row.kind for row in report.over("dp")}
    assert kinds == {"all-gather", "reduce-scatter", "all-reduce"}, str(report)
    audit.assert_one_reduction(program, axis_name="dp")
    assert models.over(report, "mp") == {"all-reduce": K * MLP.counts["all-reduce"]}, str(report)


def test_v17_a_model_axis_left_automatic():
    """V17: the whole model, its parameters placed by the same specs.

    The partitioner keeps the gradients of matrix products where the parameters are; it may gather
    that of a lookup.
    """
    mesh = models.mesh_of("4x2")
    options = {"mesh": mesh, "axis_name": "dp", "weight_fn": models.count_targets}
    fun = gradaccum.accumulate(MLP.whole, microbatches=K, **options)
    params, batch = placed(mesh, MLP.specs), models.make_batch()
    program = compiled(fun, params, batch)
    loss, grads = program(params, batch)
    assert_is_reference((loss, grads))
    elsewhere = {name for name in grads if not lies_as(grads[name], mesh, MLP.specs[name])}
    assert elsewhere <= {"table"}
    audit.assert_one_reduction(program, axis_name="dp")


@modes
@pytest.mark.parametrize("axes", [("dp", "mp"), ("mp", "dp"), "mp"], ids=str)
def test_t8_a_mean_over_the_model_axis_too(axes, typed):
    """T8: the model axis of a sharded loss is no data axis."""
    mesh, model = models.mesh_of("4x2"), MODELS["tied"]

    def loss(p, batch):
        return model.sharded(p, batch | {"targets": batch["tokens"][:, 1:]})

    options = {"in_specs": (model.specs,), "axis_name": axes, "mesh": mesh, "check_vma": typed}
    fun = gradaccum.accumulate(loss, microbatches=K, **options)
    with pytest.raises(ValueError, match=r"is used over the data axis .*mp.* axis_name; a sum"):
        jax.eval_shape(jax.grad(fun), placed(mesh, model.specs, model), models.make_batch())


def test_t8_an_average_over_shards_as_well_mixes_them():
    """T8, the control, by hand: a replicated leaf is right, a sharded one is half of two others."""
    mesh = models.mesh_of("1x4")

    def averaged(p, batch):
        return jax.tree.map(lambda g: jax.lax.pmean(g, "mp"), jax.grad(MLP.sharded)(p, batch))

    region = jax.shard_map(
        averaged, mesh=mesh, in_specs=(MLP.specs, P()), out_specs=MLP.specs, check_vma=False
    )
    got = models.jit(region)(placed(mesh, MLP.specs), models.make_batch())
    want = models.reference("mlp")[1]
    mixed = {n for n in got if np.abs(got[n] - want[n]).max() > 0.1 * np.abs(want[n]).max()}
    assert mixed == {name for name, spec in MLP.specs.items() if "mp" in str(spec)}


# --- Keys ----------------------------------------------------------------------------------------


def linen_of(mesh, fold):
    """Initialises each shard inside a shard_map, by one key or by a key of its own."""
    ids = jnp.zeros((1, 1), jnp.int32)

    def local():
        key = jax.random.key(0)
        key = jax.random.fold_in(key, jax.lax.axis_index("mp")) if fold else key
        params = models.Sharded(jnp.float32).init(key, ids)["params"]
        return jax.tree.map(lambda x: x[None], params)

    return models.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P("mp"), check_vma=False)
    )()


def test_t11_initialised_in_full_it_is_the_same_on_every_mesh():
    """T11; bitwise, each mesh initialising its own shards."""
    ids = jnp.zeros((1, 1), jnp.int32)

    def init():
        return models.Whole(jnp.float32).init(jax.random.key(0), ids)["params"]

    want = models.jit(init)()
    for mesh in map(models.mesh_of, MESHES):
        where = jax.tree.map(lambda spec, mesh=mesh: NamedSharding(mesh, spec), models.LINEN_SPECS)
        got = models.jit(init, out_shardings=where)()
        jax.tree.map(np.testing.assert_array_equal, got, want)


def test_t11_initialised_by_shard_it_is_not():
    """T11, the controls: one key makes all shards alike, a key for each replicas that differ."""
    alike = {m: linen_of(models.mesh_of(m), fold=False) for m in ("4x2", "2x4")}
    for stacked in alike.values():
        for shard in stacked["up"]["kernel"][1:]:
            np.testing.assert_array_equal(shard, stacked["up"]["kernel"][0])
    two, four = (unstack(x, models.LINEN_SPECS, "mp")["up"]["kernel"] for x in alike.values())
    assert two.shape == four.shape
    assert np.abs(two - four).max() > 0.1
    with pytest.raises(ValueError, match=r"the copies of \['down'\]\['bias'\] differ"):
        unstack(linen_of(models.mesh_of("4x2"), fold=True), models.LINEN_SPECS, "mp")


def with_dropout(loss, fold=False):
    """A loss behind dropout of a replicated scale, so the mask must be the same on all shards."""

    def dropped(p, batch, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("mp")) if fold else key
        keep = jax.random.bernoulli(key, 0.5, p["scale"].shape)
        return loss(p | {"scale": jnp.where(keep, 2 * p["scale"], 0)}, batch)

    return dropped


@modes
def test_r3_dropout_is_the_same_on_all_shards(typed):
    """The keys of accumulate are those of the data devices alone: the whole model's, on 4."""
    mesh, batch, key = models.mesh_of("4x2"), models.make_batch(), jax.random.key(3)
    options = MLP.options() | {"mesh": mesh, "check_vma": typed, "key_argnums": 2}
    fun = gradaccum.accumulate(with_dropout(MLP.sharded), microbatches=K, **options)
    got = models.jit(jax.value_and_grad(fun))(placed(mesh, MLP.specs), batch, key)
    options = {"mesh": data_mesh(4), "weight_fn": models.count_targets, "key_argnums": 2}
    fun = gradaccum.accumulate(with_dropout(MLP.whole), microbatches=K, **options)
    want = models.jit(jax.value_and_grad(fun))(models.arrays(MLP.init(), "float32"), batch, key)
    assert_close(got, jax.device_get(want), within=WITHIN)
    undropped = models.reference("mlp")[1]["scale"]  # or nothing is dropped
    assert np.abs(got[1]["scale"] - undropped).max() > 0.1 * np.abs(undropped).max()


@modes
def test_r3_a_key_folded_with_the_model_index_is_refused(typed):
    """R3: replicas would diverge."""
    mesh = models.mesh_of("4x2")
    options = MLP.options() | {"mesh": mesh, "check_vma": typed, "key_argnums": 2}
    fun = gradaccum.accumulate(with_dropout(MLP.sharded, fold=True), microbatches=K, **options)
    args = placed(mesh, MLP.specs), models.make_batch(), jax.random.key(3)
    with pytest.raises(ValueError, match="mp"):
        jax.eval_shape(jax.grad(fun), *args)


def test_r3_by_hand_such_replicas_diverge():
    """R3, the control: nobody notices that two copies of one gradient differ."""
    mesh = models.mesh_of("4x2")

    def local(p, batch, key):
        grads = jax.grad(with_dropout(MLP.sharded, fold=True))(p, batch, key)
        return grads["scale"][None]

    region = jax.shard_map(
        local, mesh=mesh, in_specs=(MLP.specs, P(), P()), out_specs=P("mp"), check_vma=False
    )
    args = placed(mesh, MLP.specs), models.make_batch(), jax.random.key(3)
    one, other = models.jit(region)(*args)
    assert np.abs(one - other).max() > 0.1 * np.abs(one).max()


# --- Transformations -----------------------------------------------------------------------------


def nested(loss):
    """The mean over rows, each by vmap, in recomputed steps of a scan, in a jit."""

    @jax.jit
    def mean(p, batch):
        @jax.checkpoint
        def part(total, rows):
            each = jax.vmap(lambda row: loss(p, {"tokens": row[None]}))(rows)
            return total + each.sum(), None

        rows = batch["tokens"].reshape(2, -1, models.T + 1)
        start = 0.0 * loss(p, {"tokens": rows[0, :1]})  # of the type that losses have
        return jax.lax.scan(part, start, rows)[0] / batch["tokens"].shape[0]

    return mean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "typed"),
    [("transformer", False), ("sequence", True)],
    ids=["transformer-untyped", "sequence-typed"],
)
def test_a_transformer_under_scan_remat_vmap_and_jit(name, typed):
    model, mesh = MODELS[name], models.mesh_of("2x4")
    options = model.options() | {"mesh": mesh, "check_vma": typed}
    fun = gradaccum.accumulate(nested(model.sharded), microbatches=K, **options)
    batch = models.make_batch()
    params = placed(mesh, model.specs, model)
    assert_is_reference(models.jit(jax.value_and_grad(fun))(params, batch), name)


def test_an_ensemble_by_vmap():
    """The gradient itself is mapped, over two sets of parameters; fused=False, as documented."""
    mesh, batch = models.mesh_of("4x2"), models.make_batch()
    fun = gradaccum.accumulate(MLP.sharded, microbatches=K, mesh=mesh, fused=False, **MLP.options())
    params = models.arrays(MLP.init(), "float32")
    both = jax.tree.map(lambda x: np.stack([x, x[::-1]]), params)
    specs = {name: P(None, *spec) for name, spec in MLP.specs.items()}
    grad = models.jit(jax.vmap(jax.value_and_grad(fun), in_axes=(0, None)))
    got = grad(models.place(both, mesh, specs), batch)
    assert_is_reference(jax.tree.map(lambda x: x[0], got))
    one = models.jit(jax.value_and_grad(fun))
    second = one(models.place(jax.tree.map(lambda x: x[1], both), mesh, MLP.specs), batch)
    assert_close(jax.tree.map(lambda x: x[1], got), jax.device_get(second), within=WITHIN)
