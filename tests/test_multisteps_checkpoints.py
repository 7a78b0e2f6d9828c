"""The state of `MultiSteps` saved in mid-window, restored, and moved to other devices."""

import dataclasses
import pickle
from typing import Any

import flax
import flax.linen as nn
import helpers
import jax
import jax.numpy as jnp
import layouts
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from helpers import assert_close
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum

jit = layouts.jit
K, CALLS, SAVED, ROWS = 3, 9, 4, 24
REPLICATED = {"w": P(), "b": P(), "v": P()}
LABELS = {"w": "a", "b": "b", "v": "a"}


def init():
    shapes = {"w": (4, 8), "b": (8,), "v": (8, 2)}
    return {n: np.float32(helpers.normal(i, *s)) for i, (n, s) in enumerate(shapes.items())}


def batch(i):
    """Returns the batch of a call; mask has unequal counts on the devices."""
    mask = np.random.default_rng(i).integers(0, 2, ROWS)
    x, y = helpers.normal(i, ROWS, 4), helpers.normal(i + 1, ROWS, 2)
    return {"x": np.float32(x), "y": np.float32(y), "mask": np.float32(mask)}


def errors(p, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ p["w"] + p["b"][None]) @ p["v"] - batch["y"]) ** 2, 1)


def mean_loss(p, batch):
    return jnp.mean(errors(p, batch))


def masked_loss(p, batch):
    return jnp.sum(batch["mask"] * errors(p, batch)) / jnp.sum(batch["mask"])


def sgd():
    return optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.1, momentum=0.9))


def multi_steps(on, k=K, inner=None, **options):
    return gradaccum.MultiSteps(inner or sgd(), k, **options, **on)


def groups(on):
    return optax.multi_transform({"a": multi_steps(on), "b": multi_steps(on, 2)}, LABELS)


MAKE = {
    "alone": multi_steps,
    "sum": lambda on: multi_steps(on, use_grad_mean=False),
    "chain": lambda on: optax.chain(optax.identity(), multi_steps(on), optax.scale(0.5)),
    "groups": groups,
    "twice": lambda on: multi_steps(on, inner=gradaccum.MultiSteps(sgd(), 2)),
    "noise": lambda on: multi_steps(
        on, inner=optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), sgd())
    ),
    "skips": lambda on: multi_steps(
        on, should_skip_update_fn=optax.transforms.skip_not_finite, accumulator_dtype=jnp.bfloat16
    ),
}


@dataclasses.dataclass
class Run:
    """Training on one mesh: the first of `sizes` devices, or all of them."""

    sizes: dict[str, int]
    make: str = "alone"
    kind: AxisType = AxisType.Auto
    specs: dict[str, P] = dataclasses.field(default_factory=lambda: REPLICATED)
    loss: Any = mean_loss
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self.mesh = layouts.mesh_of(self.sizes, self.kind)
        axes = tuple(a for a in self.sizes if a != "mp")
        self.on = {"axis_name": axes if len(axes) > 1 else axes[0], "mesh": self.mesh}
        self.tx = MAKE[self.make](self.on)
        self.mover = multi_steps(self.on)  # of any tree that holds such states
        fun = gradaccum.unreduced_value_and_grad(self.loss, **self.options, **self.on)
        self.traces = []

        @jit
        def step(params, state, batch):
            self.traces.append(1)
            updates, state = self.tx.update(fun(params, batch)[1], state, params)
            return optax.apply_updates(params, updates), state

        self.step = step

    def start(self):
        params = layouts.place(init(), self.mesh, self.specs)
        return params, self.tx.init(params)

    def go(self, params, state, calls):
        for i in calls:
            params, state = self.step(params, state, batch(i))
        return params, state


def assert_equal(got, want):
    """Asserts two trees bitwise equal."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert (a == b).all()


def assert_lies_as(got, want):
    """Asserts that two trees have the same types, and lie alike."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.shape, a.sharding, b.sharding)


def save(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / "state", tree)


def restore(path, shapes):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path / "state", shapes)


# --- On the same devices -------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["alone", "groups", "twice", "noise", "skips"])
def test_it_goes_on_bitwise(make, tmp_path):
    run = Run({"dp": 8}, make)
    saved = run.go(*run.start(), range(SAVED))
    save(tmp_path, saved)
    restored = restore(tmp_path, jax.tree.map(ocp.tree.to_shape_dtype_struct, run.start()))
    assert_equal(restored, saved)
    assert_lies_as(restored, saved)
    went_on = run.go(*saved, range(SAVED, CALLS))
    assert_equal(run.go(*restored, range(SAVED, CALLS)), went_on)
    assert len(run.traces) == 1
    if make == "alone":  # as NumPy arrays, by other means
        as_bytes = flax.serialization.to_bytes(saved)
        read = flax.serialization.from_bytes(run.start(), as_bytes)
        unpickled = pickle.loads(pickle.dumps(jax.device_get(saved)))
        for tree in (read, unpickled, run.tx.resize(unpickled, run.mesh)):
            assert_equal(run.go(*tree, range(SAVED, CALLS)), went_on)


def test_a_train_state(tmp_path):
    """With what flax makes of it; and what comes of it is what full batches give."""
    run, model = Run({"dp": 8}), nn.Dense(2)

    def loss(params, batch):
        return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)

    def train(state, grad_fn, batches):
        step = jit(lambda state, batch: state.apply_gradients(grads=grad_fn(state.params, batch)))
        for b in batches:
            state = step(state, b)
        return state

    def start(tx):
        params = model.init(jax.random.key(0), jnp.ones((1, 4)))["params"]
        params = jax.device_put(params, NamedSharding(run.mesh, P()))
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    rows = gradaccum.unreduced_value_and_grad(loss, **run.on)
    calls = [batch(i) for i in range(CALLS)]
    state = train(start(run.tx), lambda *a: rows(*a)[1], calls[:SAVED])
    save(tmp_path, state)
    state = restore(tmp_path, jax.tree.map(ocp.tree.to_shape_dtype_struct, start(run.tx)))
    state = train(state, lambda *a: rows(*a)[1], calls[SAVED:])
    full = [
        jax.tree.map(lambda *x: np.concatenate(x), *calls[i : i + K]) for i in range(0, CALLS, K)
    ]
    assert_close(state.params, train(start(sgd()), jax.grad(loss), full).params)
    assert state.tx.has_updated(state.opt_state)


# --- On other devices ----------------------------------------------------------------------------

FSDP = {"w": P(None, "dp"), "b": P(), "v": P("dp")}
MODEL = {"w": P(None, "mp"), "b": P("mp"), "v": P("mp")}
SPLIT = {"in_specs": (FSDP, P("dp"))}
TOKENS = {"weight_fn": lambda batch: batch["mask"].sum()}
EXPLICIT = {"kind": AxisType.Explicit}

MOVES = {
    "fewer": ({"dp": 8}, {"dp": 4}, {}),
    "more": ({"dp": 4}, {"dp": 8}, {}),
    "no multiple": ({"dp": 6}, {"dp": 4}, {}),
    "fewer, Explicit": ({"dp": 8}, {"dp": 4}, EXPLICIT),
    "more, Explicit": ({"dp": 3}, {"dp": 8}, EXPLICIT),
    "weighted": ({"dp": 8}, {"dp": 6}, {"loss": masked_loss, "options": TOKENS}),
    "the sum": ({"dp": 8}, {"dp": 4}, {"make": "sum"}),
    "chain": ({"dp": 8}, {"dp": 4}, {"make": "chain"}),
    "groups": ({"dp": 8}, {"dp": 4}, {"make": "groups"}),
    "twice": ({"dp": 4}, {"dp": 8}, {"make": "twice"}),
    "fsdp": ({"dp": 8}, {"dp": 4}, {"specs": FSDP, "options": SPLIT}),
    "two axes": ({"r": 2, "dp": 4}, {"r": 3, "dp": 2}, {}),
    "beside a model axis": ({"dp": 4, "mp": 2}, {"dp": 2, "mp": 2}, {"specs": MODEL}),
    "model axis, Explicit": ({"dp": 4, "mp": 2}, {"dp": 2, "mp": 4}, {"specs": MODEL, **EXPLICIT}),
}


def types(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def window_sums(tree):
    """Returns what the open windows of a tree's states add up to, and their weights."""
    found = jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "acc_grads"))
    rows = [(x.acc_grads, x.weight) for x in found if hasattr(x, "acc_grads")]
    return jax.tree.map(lambda x: np.asarray(x, np.float64).sum(0), rows)


@pytest.mark.parametrize("name", MOVES)
def test_a_window_goes_on_on_other_devices(name, tmp_path):
    """Saved there and restored here by the recipe of `resize`: the same mean, the same training."""
    before, after, options = MOVES[name]
    there, here = Run(before, **options), Run(after, **options)
    saved = there.go(*there.start(), range(SAVED))
    save(tmp_path, saved)
    abstract = AbstractMesh(tuple(before.values()), tuple(before))
    shapes = here.mover.resize(here.start(), abstract)
    assert types(shapes) == types(saved)
    moved = here.mover.resize(restore(tmp_path, shapes), here.mesh)
    assert_lies_as(moved, here.start())
    assert_close(window_sums(moved), window_sums(saved), within=1e-6)
    want, _ = there.go(*saved, range(SAVED, CALLS))
    got, _ = here.go(*moved, range(SAVED, CALLS))
    assert_close(got, want, within=3e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 8])
def test_resize_to_any_number(n):
    """Of arrays on a mesh or none, and of shapes; a split that does not divide any more ends."""
    run, resize = Run({"dp": 4}, "chain", specs=FSDP), multi_steps({"axis_name": "dp"}).resize
    tree = jax.tree.map(
        lambda x: x + np.arange(x.size, dtype=x.dtype).reshape(x.shape), run.start()
    )
    new = Run({"dp": n}, "chain", specs=FSDP if 8 % n == 0 else REPLICATED)
    moved = resize(tree, new.mesh)
    assert_close(window_sums(moved), window_sums(tree), within=1e-6)
    assert_lies_as(moved, new.start())
    unplaced = Run({"dp": n}, "chain").start()
    assert_lies_as(resize(jax.device_get(tree), new.mesh), unplaced)
    assert_lies_as(resize(jax.eval_shape(lambda: tree), new.mesh), unplaced)


def test_a_plain_state_moves_as_it_is():
    run, tx = Run({"dp": 8}), gradaccum.MultiSteps(sgd(), K)
    params, _ = run.start()
    state = jax.tree.map(jnp.ones_like, tx.init(params))
    moved = tx.resize(state, helpers.data_mesh(4))
    assert_equal(jax.device_get(moved), jax.device_get(state))
    assert {x.sharding.mesh.size for x in jax.tree.leaves(moved)} == {4}


@pytest.mark.parametrize("on", [{}, Run({"dp": 8}).on], ids=["plain", "rows"])
def test_a_run_moves_over_from_optax(on):
    """Between two windows, as the message says that a state of optax's gets."""
    params, _ = Run({"dp": 8}).start()
    tx, old = gradaccum.MultiSteps(sgd(), K, **on), optax.MultiSteps(sgd(), K)
    state, step = old.init(params), jit(old.update)
    for _ in range(K):
        _, state = step(params, state, params)
    with pytest.raises(TypeError, match=r"a optax\.\S+\.MultiStepsState; give what init, update"):
        tx.update(params, state, params)
    kept = {n: getattr(state, n) for n in ("gradient_step", "inner_opt_state")}
    moved = tx.init(params)._replace(**kept)
    assert moved.gradient_step == 1
    assert_equal(moved.inner_opt_state, state.inner_opt_state)
    assert types(moved) == types(tx.init(params))
