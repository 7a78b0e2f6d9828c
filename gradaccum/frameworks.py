"""Recipes: a decorated loss in plain JAX, Haiku, Flax linen, Flax nnx and Equinox.

Nothing is to be imported from here: read it with `help("gradaccum.frameworks")`. In each recipe the
loss is what it was, with one line above it, and the step around it does not change. All share this:

    >>> import jax, jax.numpy as jnp, optax, gradaccum
    >>> mesh = jax.make_mesh((jax.device_count(),), ("dp",))
    >>> over = {"microbatches": 2, "axis_name": "dp", "mesh": mesh}
    >>> batch = {"x": jnp.ones((64, 5)), "y": jnp.zeros((64, 3))}

Plain JAX:

    >>> @gradaccum.accumulate(**over)
    ... def loss_fn(params, batch):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> loss, grads = jax.jit(jax.value_and_grad(loss_fn))({"w": jnp.ones((5, 3))}, batch)
    >>> print(loss, grads["w"].shape)
    25.0 (5, 3)

Haiku, with rng and state. The key is folded with the microbatch's index (`key_argnums`). The new
state is aux: its mean over microbatches and devices is one update of each moving average. Counters
are integers, which have no mean: they travel as floats, and are cast back.

    >>> import haiku as hk
    >>> def network(x):
    ...     hk.ExponentialMovingAverage(0.9)(jnp.mean(x, axis=0))
    ...     x = hk.dropout(hk.next_rng_key(), 0.1, jnp.tanh(hk.Linear(8)(x)))
    ...     return hk.Linear(3)(x)
    >>> model = hk.transform_with_state(network)
    >>> params, state = model.init(jax.random.key(0), batch["x"])
    >>> @gradaccum.accumulate(batch_argnums=3, key_argnums=2, has_aux=True, **over)
    ... def haiku_loss(params, state, key, batch):
    ...     out, new = model.apply(params, state, key, batch["x"])
    ...     new = jax.tree.map(lambda x: x.astype(jnp.float32), new)
    ...     return jnp.mean((out - batch["y"]) ** 2), new
    >>> step = jax.jit(jax.value_and_grad(haiku_loss, has_aux=True))
    >>> (loss, new), grads = step(params, state, jax.random.key(1), batch)
    >>> state = jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)
    >>> print(state["exponential_moving_average"]["counter"])
    1

Flax linen, with dropout and BatchNorm. Statistics are aux as well: one moving-average update a
step. The running mean is that of the full batch; the running variance is the mean of microbatch
variances, and so lacks the variance of their means: take microbatches that are not too small.

    >>> import flax.linen as nn
    >>> class Net(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x, train):
    ...         x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(8)(x))
    ...         return nn.Dense(3)(nn.Dropout(0.1, deterministic=not train)(nn.tanh(x)))
    >>> net = Net()
    >>> variables = net.init(jax.random.key(0), batch["x"], train=False)
    >>> @gradaccum.accumulate(batch_argnums=3, key_argnums=2, has_aux=True, **over)
    ... def linen_loss(params, stats, key, batch):
    ...     out, new = net.apply(
    ...         {"params": params, "batch_stats": stats}, batch["x"], train=True,
    ...         mutable=["batch_stats"], rngs={"dropout": key})
    ...     return jnp.mean((out - batch["y"]) ** 2), new["batch_stats"]
    >>> step = jax.jit(jax.value_and_grad(linen_loss, has_aux=True))
    >>> key = jax.random.key(1)
    >>> (loss, stats), grads = step(variables["params"], variables["batch_stats"], key, batch)
    >>> print(sorted(stats["BatchNorm_0"]))
    ['mean', 'var']

A Flax `TrainState` loop stays as it is:

    >>> from flax.training.train_state import TrainState
    >>> dense = nn.Dense(3)
    >>> @gradaccum.accumulate(**over)
    ... def dense_loss(params, batch):
    ...     return jnp.mean((dense.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)
    >>> train_state = TrainState.create(
    ...     apply_fn=dense.apply, tx=optax.adamw(1e-2),
    ...     params=dense.init(jax.random.key(0), batch["x"])["params"])
    >>> @jax.jit
    ... def train_step(train_state, batch):
    ...     grads = jax.grad(dense_loss)(train_state.params, batch)
    ...     return train_state.apply_gradients(grads=grads)
    >>> print(train_step(train_state, batch).step)
    1

Flax nnx. A module whose state does not change is an argument like any other. One whose state does,
by dropout or BatchNorm, is split before and merged inside, as its changes would stay in the trace:

    >>> from flax import nnx
    >>> @gradaccum.accumulate(**over)
    ... def nnx_loss(model, batch):
    ...     return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    >>> loss, grads = nnx.value_and_grad(nnx_loss)(nnx.Linear(5, 3, rngs=nnx.Rngs(0)), batch)

    >>> class Noisy(nnx.Module):
    ...     def __init__(self, rngs):
    ...         self.linear = nnx.Linear(5, 3, rngs=rngs)
    ...         self.norm = nnx.BatchNorm(3, rngs=rngs)
    ...         self.dropout = nnx.Dropout(0.1, rngs=rngs)
    ...     def __call__(self, x):
    ...         return self.dropout(self.norm(self.linear(x)))
    >>> noisy = Noisy(nnx.Rngs(params=0, dropout=1))
    >>> graph, params, stats, rest = nnx.split(noisy, nnx.Param, nnx.BatchStat, ...)
    >>> @gradaccum.accumulate(batch_argnums=4, key_argnums=(2, 3), has_aux=True, **over)
    ... def noisy_loss(params, stats, rest, key, batch):
    ...     model = nnx.merge(graph, params, stats, rest)
    ...     nnx.reseed(model, dropout=key)
    ...     loss = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    ...     return loss, nnx.state(model, nnx.BatchStat)
    >>> step = jax.jit(jax.value_and_grad(noisy_loss, has_aux=True))
    >>> (loss, stats), grads = step(params, stats, rest, jax.random.key(2), batch)
    >>> nnx.update(noisy, params, stats)

Equinox. Modules keep their static fields; `filter_value_and_grad` goes around the decorated loss:

    >>> import equinox as eqx
    >>> @gradaccum.accumulate(**over)
    ... def equinox_loss(model, batch):
    ...     return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)
    >>> linear = eqx.nn.Linear(5, 3, key=jax.random.key(0))
    >>> loss, grads = eqx.filter_jit(eqx.filter_value_and_grad(equinox_loss))(linear, batch)
    >>> print(grads.weight.shape)
    (3, 5)

A tensor-parallel loss that was written for `jit` changes by two lines too, this decorator and its
mesh: the model axis stays automatic, so the loss's own constraints hold, and what it communicates
over that axis is what it was.

    >>> from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    >>> size = 2 if jax.device_count() % 2 == 0 else 1
    >>> grid = jax.make_mesh(
    ...     (jax.device_count() // size, size), ("dp", "mp"), axis_types=(AxisType.Auto,) * 2)
    >>> @gradaccum.accumulate(microbatches=2, axis_name="dp", mesh=grid)
    ... def parallel_loss(params, batch):
    ...     hidden = jnp.tanh(batch["x"] @ params["up"])
    ...     hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(grid, P(None, "mp")))
    ...     return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)
    >>> params = {
    ...     "up": jax.device_put(jnp.ones((5, 8)), NamedSharding(grid, P(None, "mp"))),
    ...     "down": jax.device_put(jnp.ones((8, 3)), NamedSharding(grid, P("mp")))}
    >>> grads = jax.jit(jax.grad(parallel_loss))(params, batch)
    >>> print(grads["down"].sharding.spec)
    P('mp',)
"""
