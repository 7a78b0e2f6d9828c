"""After ten optimizer steps on dp x mp the parameters are those of the whole model's run.

AdamW divides by sqrt(v) + eps: with these runs' eps an error of a gradient reaches a parameter at
most lr / eps = 10 times as large, in each of ten steps. Of gradients that are clipped to 0.2 the
1e-12 and 2e-5 that they may be off make 2e-11 and 4e-4 at worst. What is allowed here is less, as
2e-15 and 5e-6 of a parameter's largest entry are measured; a wrong factor makes 1e-3 and more.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import parallel_models as models
import pytest
from helpers import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from parallel_models import MESHES, MODELS

import gradaccum
from gradaccum import audit
from gradaccum.tensor_parallel import clip_by_global_norm

STEPS, MAX_NORM = 10, 0.2
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
K = 2


def adamw():
    return optax.adamw(1e-2, eps=1e-3, weight_decay=1e-2)


def over_whole_arrays():
    return optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw())


def over_shards(specs):
    return optax.chain(clip_by_global_norm(MAX_NORM, specs, "mp"), adamw())


def train(step, params, state):
    """Runs `step(params, state, batch)` on a batch a step, each of another number of targets."""
    losses = []
    for i in range(STEPS):
        loss, params, state = step(params, state, models.make_batch(seed=i))
        losses.append(loss)
    return jax.device_get((params, losses))


def apply(tx, grads, state, params):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@functools.cache
def unsharded(name):
    """Returns the run on one device, without gradaccum, in float64, and its gradients' norms."""
    fun, tx, norms = jax.value_and_grad(MODELS[name].whole), over_whole_arrays(), []

    @models.jit
    def compiled(params, state, batch):
        loss, grads = fun(params, batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        return loss, norm, apply(tx, grads, state, params)

    def step(params, state, batch):
        loss, norm, (params, state) = compiled(params, state, batch)
        norms.append(float(norm))
        return loss, params, state

    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, MODELS[name].init())
        return *train(step, params, tx.init(params)), norms


# --- Ways to take a step; each returns the optimizer and step(params, state, batch) --------------


def clip_outside(model, mesh, typed):
    """Accumulated gradients are global arrays: any optax transformation is right on them."""
    options = model.options() | {"mesh": mesh, "check_vma": typed}
    fun = gradaccum.accumulate(model.sharded, microbatches=K, **options)
    tx = over_whole_arrays()

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(fun)(params, batch)
        return loss, *apply(tx, grads, state, params)

    return tx, step


def state_specs(tx, params, specs):
    state = jax.eval_shape(tx.init, params)
    return optax.tree_map_params(
        tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P()
    )


def clip_inside(model, mesh, typed, clip=over_shards):
    """The optimizer runs on shards, inside a shard_map of its own."""
    options = model.options() | {"mesh": mesh, "check_vma": typed}
    fun = gradaccum.accumulate(model.sharded, microbatches=K, **options)
    tx, specs = clip(model.specs), model.specs

    def step(params, state, batch):
        loss, grads = jax.value_and_grad(fun)(params, batch)
        lie = state_specs(tx, params, specs)
        update = jax.shard_map(
            lambda *args: apply(tx, *args),
            mesh=mesh,
            in_specs=(specs, lie, specs),
            out_specs=(specs, lie),
            check_vma=typed,
        )
        return loss, *update(grads, state, params)

    return tx, step


def all_inside(model, mesh, typed):
    """The whole step in the user's own shard_map, over both axes."""
    options = {name: x for name, x in model.options().items() if name != "in_specs"}
    fun = gradaccum.accumulate(model.sharded, microbatches=K, **options)
    tx, specs = over_shards(model.specs), model.specs

    def local(params, state, batch):
        loss, grads = jax.value_and_grad(fun)(params, batch)
        return loss, *apply(tx, grads, state, params)

    def step(params, state, batch):
        lie = state_specs(tx, params, specs)
        region = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs, lie, P("dp")),
            out_specs=(P(), specs, lie),
            check_vma=typed,
        )
        return region(params, state, batch)

    return tx, step


def multisteps(model, mesh, typed):
    """A window of two calls, of half a batch each; the mean, clipping and AdamW once."""
    options = model.options() | {"mesh": mesh, "check_vma": typed, "microbatches": K}
    fun = gradaccum.unreduced_value_and_grad(model.sharded, **options)
    tx = gradaccum.MultiSteps(over_whole_arrays(), 2, axis_name="dp", mesh=mesh)

    def call(params, state, batch):
        loss, grads = fun(params, batch)
        return loss, *apply(tx, grads, state, params)

    def step(params, state, batch):
        first, second = (jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2))
        one, same, state = call(params, state, first)
        two, params, state = call(same, state, second)
        return gradaccum.mean(gradaccum.add(one, two)), params, state

    return tx, step


WAYS = (clip_outside, clip_inside, all_inside, multisteps)
CASES = [
    (
        way,
        mesh,
        ("mlp", "haiku", "tied")[(i + j) % 3],
        tuple(TOLERANCE)[(i + j) % 2],
        j // 2 == i % 2,
    )
    for (i, way), (j, mesh) in itertools.product(enumerate(WAYS), enumerate(MESHES))
]


def name_of(case):
    way, mesh, model, dtype, typed = case
    return f"{way.__name__}-{mesh}-{model}-{dtype}-{'typed' if typed else 'untyped'}"


def run(way, mesh, name, dtype, typed):
    model, mesh = MODELS[name], models.mesh_of(mesh)
    with jax.enable_x64(dtype == "float64"):
        tx, step = way(model, mesh, typed)
        params = models.place(models.arrays(model.init(), dtype), mesh, model.specs)
        here = NamedSharding(mesh, P())
        state = jax.tree.map(
            lambda x: x if x.sharding.device_set == here.device_set else jax.device_put(x, here),
            tx.init(params),
        )
        stay = jax.tree.map(lambda x: x.sharding, (params, state))
        program = models.jit(step, out_shardings=(None, *stay))
        program = program.lower(params, state, models.make_batch()).compile()
        return *train(program, params, state), program


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_ten_steps_are_the_whole_models(case):
    way, _, name, dtype, _ = case
    params, losses, program = run(*case)
    want, want_losses, _ = unsharded(name)
    assert_close(params, want, within=TOLERANCE[dtype])
    np.testing.assert_allclose(losses, want_losses, rtol=TOLERANCE[dtype])
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {dtype}
    if way is not multisteps:
        audit.assert_one_reduction(program, axis_name="dp")


@pytest.mark.parametrize("name", ["mlp", "haiku", "tied"])
def test_every_step_of_these_runs_clips(name):
    """Or clipping would not be seen; and parameters move far beyond the tolerance."""
    params, losses, norms = unsharded(name)
    assert min(norms) > MAX_NORM
    moved = jax.tree.map(
        lambda a, b: np.abs(a - b).max() / np.abs(a).max(), params, MODELS[name].init()
    )
    assert min(jax.tree.leaves(moved)) > 1e-3
    assert len(set(map(float, losses))) == STEPS


def test_clipping_by_each_shards_own_norm_is_not_the_whole_models():
    """The control: `optax.clip_by_global_norm` on shards; replicas differ, unnoticed."""

    def by_shard(specs):
        del specs
        return over_whole_arrays()

    way = functools.partial(clip_inside, clip=by_shard)
    params, _, _ = run(way, "2x4", "mlp", "float64", False)
    want, _, _ = unsharded("mlp")
    for name, x in params.items():
        assert np.abs(x - want[name]).max() > 1e-3 * np.abs(want[name]).max(), name


def test_a_window_reduces_once_over_data_in_its_last_call():
    """Over the model axis what each microbatch needs; over data one mean, in the taken branch."""
    model, mesh = MODELS["mlp"], models.mesh_of("4x2")
    options = model.options() | {"mesh": mesh, "microbatches": K}
    fun = gradaccum.unreduced_value_and_grad(model.sharded, **options)
    tx = gradaccum.MultiSteps(over_whole_arrays(), 2, axis_name="dp", mesh=mesh)

    def call(params, state, batch):
        _, grads = fun(params, batch)
        return apply(tx, grads, state, params)

    params = models.place(models.arrays(model.init(), "float32"), mesh, model.specs)
    args = params, tx.init(params), models.make_batch()
    program = models.jit(call).lower(*args).compile()
    audit.assert_one_reduction(program, axis_name="dp", conditional=True)
    report = audit.collectives(program)
    assert all(row.conditional for row in report if "dp" in row.axes), str(report)
    loops = [row for row in report.over("mp") if row.loops]
    assert sum(row.executions for row in loops) == K * sum(model.counts.values()), str(report)
    norm = [row for row in report.over("mp") if not row.loops]
    assert sum(row.bytes for row in norm) <= 8 * len(params), str(report)  # the clipped norm
