"""`MultiSteps` among other transformations, around all kinds of optimizers, and in frameworks."""

import functools

import equinox as eqx
import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum

jit = layouts.jit
K, CALLS = 2, 12
MESH = helpers.data_mesh(8)
ON_MESH = {"axis_name": "dp", "mesh": MESH}
KINDS = {"plain": {}, "unreduced": ON_MESH}
both_kinds = pytest.mark.parametrize("kind", KINDS)


def init(dtype=jnp.float32):
    """Returns parameters, among them a leaf that is None."""
    w, b, v = (jnp.asarray(helpers.normal(len(s), *s), dtype) for s in ((4, 3), (3,), (3, 2)))
    return {"w": w, "b": b, "v": v, "none": None}


def loss_fn(p, batch):
    h = jnp.tanh(batch["x"].astype(p["w"].dtype) @ p["w"] + p["b"][None]) @ p["v"]
    return jnp.mean((p.get("scale", 1) * h - batch["y"]) ** 2).astype(jnp.float32)


ROWS = functools.partial(gradaccum.unreduced_value_and_grad, **ON_MESH)
FUNS = {"plain": jit(jax.value_and_grad(loss_fn)), "unreduced": jit(ROWS(loss_fn))}


def batches(size=1):
    """Yields the batches of `size` calls, together."""
    for i in range(0, CALLS, size):
        rows = np.concatenate([helpers.normal(c, 16, 6) for c in range(i, i + size)])
        yield {"x": np.float32(rows[:, :4]), "y": np.float32(rows[:, 4:])}


def train(tx, kind="plain", size=1, params=None, extra=None, funs=FUNS):
    """Returns parameters and state after all batches, and the updates of each call."""
    params = init() if params is None else params
    if kind == "unreduced":
        params = jax.device_put(params, NamedSharding(MESH, P()))
    state, traces, found = tx.init(params), [], []
    if size > 1:  # the reference: optax's states may be weakly typed, and would be traced twice
        state = jax.tree.map(lambda x: jnp.asarray(x, x.dtype), state)

    @jit
    def step(params, state, grads, extra):
        traces.append(1)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state, updates

    for batch in batches(size):
        _, grads = funs[kind](params, batch)
        given = extra(params, kind) if extra else {}
        params, state, updates = step(params, state, grads, given)
        found.append(updates)
    assert len(traces) == 1 or "scale" in params or not isinstance(tx, gradaccum.MultiSteps)
    return params, state, found


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def assert_same(got, want, within=None):
    """Asserts two trees equal: types, counters and keys exactly, numbers up to rounding."""
    assert types(got) == types(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if jnp.issubdtype(a.dtype, jnp.inexact):
            assert_close(a, b, within=within)
        else:
            assert (a == b).all()


def sgd(rate=0.1):
    """A step that a gradient of another scale changes."""
    return optax.chain(optax.add_decayed_weights(0.1), optax.sgd(rate, momentum=0.9))


# --- In and around other transformations: `acc` accumulates, or does nothing (the reference) -----

LABELS = {"w": "a", "b": "b", "v": "a", "none": None}
MASK = {"w": True, "b": False, "v": True, "none": None}
OTHERS = jax.tree.map(lambda x: not x, MASK)
inject = optax.inject_hyperparams


def even(transform):
    return optax.transforms.conditionally_transform(transform, lambda step: step % 2 == 0)


def noisy(updates, key, params=None):
    key, own = jax.random.split(key)
    return {**updates, "b": updates["b"] + jax.random.normal(own, (3,))}, key


NOISE = optax.GradientTransformation(lambda _: jax.random.PRNGKey(3), noisy)
STRUCTURES = {
    "chain, first": lambda acc: optax.chain(acc(sgd()), optax.scale(0.5)),
    "chain, second": lambda acc: optax.chain(optax.identity(), acc(sgd())),
    "named chain": lambda acc: optax.named_chain(("i", optax.identity()), ("acc", acc(sgd()))),
    "masked": lambda acc: optax.chain(*(optax.masked(acc(sgd()), mask) for mask in (MASK, OTHERS))),
    "partition": lambda acc: optax.partition({"a": acc(sgd()), "b": acc(sgd(0.3))}, LABELS),
    "hyperparameters": lambda acc: inject(lambda rate: acc(optax.sgd(rate)))(rate=0.1),
}
OPTIMIZERS = {
    "masked inside": optax.masked(sgd(), MASK),
    "frozen inside": optax.partition({"a": sgd(), "b": optax.set_to_zero()}, LABELS),
    "hyperparameters inside": inject(optax.adamw)(optax.exponential_decay(0.1, 1, 0.7)),
    "if finite, inside": optax.apply_if_finite(sgd(), 3),
    "conditions inside": optax.chain(sgd(), even(optax.scale(0.5))),
    "typed key": optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), sgd()),
    "raw key": optax.chain(NOISE, sgd()),
    "adamw": optax.adamw(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "lion": optax.lion(0.1),
    "lamb": optax.lamb(0.1),
    "muon": optax.contrib.muon(0.1),
    "schedule_free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
    "prodigy": optax.contrib.prodigy(),
}
MAKE = STRUCTURES | {n: lambda acc, tx=tx: acc(tx) for n, tx in OPTIMIZERS.items()}
CASES = [(n, "float32") for n in MAKE] + [(n, "bfloat16") for n in ("adafactor", "schedule_free")]


@functools.cache
def full_batches(name, dtype):
    return train(MAKE[name](lambda tx: tx), size=K, params=init(dtype))


@both_kinds
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_o21_o23_it_stands_for_its_inner_optimizer(name, dtype, kind):
    """Parameters, the dtypes of updates, the inner state with its dtypes."""
    accumulate = functools.partial(gradaccum.MultiSteps, every_k_schedule=K, **KINDS[kind])
    got, state, updates = train(MAKE[name](accumulate), kind, params=init(dtype))
    want, inner, wanted = full_batches(name, dtype)
    assert_same(got, want)
    assert types(updates) == types(wanted) * K
    assert not any(u["w"].any() for u in updates[::K])
    if name in OPTIMIZERS:
        squares = 5e-2 if dtype == "bfloat16" else None  # their errors are twice as large
        assert_same(state.inner_opt_state, inner, squares)
    if name == "schedule_free":
        mean = optax.contrib.schedule_free_eval_params
        assert_same(mean(state.inner_opt_state, got), mean(inner, want))


def moved(updates, name):
    return [bool(u[name].any()) for u in updates]


@both_kinds
def test_o21_o23_groups_with_windows_of_their_own(kind):
    """k = 2 and k = 3, and a group without leaves; as optax does for plain gradients."""

    def grouped(accumulate):
        by_k = {"a": accumulate(sgd(), 2), "b": accumulate(sgd(0.3), 3), "c": accumulate(sgd(), 2)}
        return optax.multi_transform(by_k, LABELS)

    want, _, _ = train(grouped(lambda *a: optax.MultiSteps(*a).gradient_transformation()))
    got, _, updates = train(grouped(functools.partial(gradaccum.MultiSteps, **KINDS[kind])), kind)
    assert_same(got, want)
    assert moved(updates, "w") == [False, True] * 6
    assert moved(updates, "b") == [False, False, True] * 4


@both_kinds
def test_twice(kind):
    """The inner one takes the means of the outer one: six calls a step."""
    tx = gradaccum.MultiSteps(gradaccum.MultiSteps(sgd(), 3), 2, **KINDS[kind])
    got, state, updates = train(tx, kind)
    assert_same(got, train(sgd(), size=6)[0])
    assert tx.has_updated(state)
    assert moved(updates, "w") == ([False] * 5 + [True]) * 2
    grads, step = FUNS[kind](got, next(batches()))[1], jit(tx.update)
    for _ in range(2):  # its own window closes, the inner one's does not
        _, state = step(grads, state, got)
        assert not tx.has_updated(state)


@both_kinds
def test_k_is_a_hyperparameter(kind):
    """Traced, from a schedule over calls: windows of 1 call, then of 3."""
    fixed = ("opt", "use_grad_mean", "axis_name", "mesh")
    tx = inject(gradaccum.MultiSteps, static_args=fixed)(
        opt=sgd(), every_k_schedule=lambda call: jnp.where(call < 3, 1, 3), **KINDS[kind]
    )
    params, _, updates = train(tx, kind)
    assert moved(updates, "w") == [True] * 3 + [False, False, True] * 3
    want, _, _ = train(optax.MultiSteps(sgd(), lambda step: jnp.where(step < 3, 1, 3)))
    assert_same(params, want)


AROUND = {
    "if finite": lambda tx: optax.apply_if_finite(tx, 3),
    "conditions": even,
    "frozen": lambda tx: optax.partition({"a": tx, "b": optax.set_to_zero()}, LABELS),
    "masked": lambda tx: optax.masked(tx, MASK),
    "masked by a function": lambda tx: optax.masked(tx, lambda t: jax.tree.map(jnp.ndim, t)),
}


@pytest.mark.parametrize("name", AROUND)
def test_outside_there_are_no_means(name):
    """What passes gradients on, or looks at their arrays, belongs inside."""
    tx = AROUND[name](gradaccum.MultiSteps(sgd(), K, **ON_MESH))
    with pytest.raises((TypeError, ValueError), match="Unreduced"):
        train(tx, "unreduced")


def test_around_plain_gradients():
    want, _, _ = train(sgd(), size=K)
    tx = optax.apply_if_finite(gradaccum.MultiSteps(sgd(), K), 3)
    assert_same(train(tx)[0], want)
    with jax.set_mesh(MESH):
        tx = optax.chain(gradaccum.all_reduce_mean("dp"), gradaccum.MultiSteps(sgd(), K))
        assert_same(train(tx, "unreduced")[0], want)


@both_kinds
def test_what_a_line_search_needs_reaches_it(kind):
    """An unreduced value as its mean."""
    batch = next(batches())
    value_fn = jax.tree_util.Partial(lambda params: loss_fn(params, batch))

    def extra(params, kind):
        value, (_, grad) = FUNS[kind](params, batch)[0], FUNS["plain"](params, batch)
        return {"value": value, "grad": grad, "value_fn": value_fn}

    search = optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3))
    want, inner, _ = train(search, size=K, extra=extra)
    got, state, _ = train(gradaccum.MultiSteps(search, K, **KINDS[kind]), kind, extra=extra)
    assert_same((got, state.inner_opt_state), (want, inner))


@both_kinds
def test_leaves_that_are_no_jax_arrays(kind):
    params = {**jax.tree.map(np.asarray, init()), "scale": 2.0}
    want, inner, _ = train(sgd(), size=K, params=params)
    got, state, _ = train(gradaccum.MultiSteps(sgd(), K, **KINDS[kind]), kind, params=params)
    assert_same((got, state.inner_opt_state), (want, inner))


def test_optax_finds_its_state():
    tx = optax.chain(gradaccum.MultiSteps(optax.adamw(0.1), K, **ON_MESH), optax.scale(0.5))
    params, state, _ = train(tx, "unreduced")
    get, put = optax.tree_utils.tree_get, optax.tree_utils.tree_set
    assert [get(state, n) for n in ("mini_step", "gradient_step", "count")] == [0, 6, 6]
    state = put(put(state, mini_step=jnp.int32(1)), count=jnp.int32(0))
    _, state = tx.update(FUNS["unreduced"](params, next(batches()))[1], state, params)
    assert (get(state, "mini_step"), get(state, "count")) == (0, 1)
    ones = optax.tree_map_params(tx, lambda _: 1, state, transform_non_params=lambda _: 0)
    assert get(ones, "mu") == get(ones, "acc_grads") == jax.tree.map(lambda _: 1, params)
    assert get(ones, "weight") == get(ones, "acc_grads")
    assert get(ones, "count") == 0


# --- In frameworks -------------------------------------------------------------------------------


def test_in_equinox():
    model = eqx.nn.MLP(4, 2, 3, 1, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, batch):
        return jnp.mean((jax.vmap(eqx.combine(params, static))(batch["x"]) - batch["y"]) ** 2)

    given = {"params": params, "funs": {"plain": jax.value_and_grad(loss), "unreduced": ROWS(loss)}}
    got, _, _ = train(gradaccum.MultiSteps(sgd(), K, **ON_MESH), "unreduced", **given)
    assert_same(got, train(sgd(), size=K, **given)[0])


def test_in_nnx():
    def loss(model, batch):
        return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)

    def run(tx, fun, size=1):
        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        step = nnx.jit(lambda optimizer, m, batch: optimizer.update(m, fun(m, batch)[1]))
        for batch in batches(size):
            step(optimizer, model, batch)
        return nnx.state(model)

    tx = gradaccum.MultiSteps(sgd(), K, **ON_MESH)
    assert_same(run(tx, ROWS(loss)), run(sgd(), nnx.value_and_grad(loss), K))
