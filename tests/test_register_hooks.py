"""Registering hooks: order, handles, when it is too late, and what is refused with which words."""

import dataclasses
import functools

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import gradaccum

X = jnp.array([1.0, 2.0, 3.0, 4.0])


def loss_fn(w, x):
    return jnp.mean(w * x)


def decorated(fun=loss_fn, k=2, **options):
    return gradaccum.accumulate(fun, microbatches=k, axis_name=None, **options)


def gradient(fun, w=0.0, x=X):
    return float(jax.grad(fun)(w, x))


def plus(amount, scale=1.0):
    """Returns a hook, g -> scale * g + amount; two with scales do not commute."""
    return lambda grads, *, index: jax.tree.map(lambda g: scale * g + amount, grads)


def plus_on_mean(amount, scale=1.0):
    return lambda grads: jax.tree.map(lambda g: scale * g + amount, grads)


@dataclasses.dataclass(frozen=True)
class passes:  # noqa: N801
    """A communication hook that is never called here."""

    def init(self, unreduced):
        del unreduced
        return ()

    def __call__(self, unreduced, state):
        return unreduced, state


# --- Order ----------------------------------------------------------------------------------------

FIRST, SECOND = (1.0, 1.0), (0.0, 3.0)  # 2.5 -> 3 * (2.5 + 1) = 10.5, the other way 3 * 2.5 + 1


@pytest.mark.parametrize(("make", "kind"), [(plus, "hook"), (plus_on_mean, "post_accumulate_hook")])
def test_hooks_run_in_their_order_those_given_first(make, kind):
    first, second = make(*FIRST), make(*SECOND)
    for given, registered, want in [
        ([first, second], [], 10.5),
        ((second, first), [], 8.5),
        (None, [first, second], 10.5),
        (first, [second], 10.5),
        ([second], [first], 8.5),
        ((), [], 2.5),
    ]:
        fun = decorated(**{kind: given})
        for fn in registered:
            assert repr(getattr(fun, f"register_{kind}")(fn)) == f"<gradaccum handle of a {kind}>"
        assert gradient(fun) == want


def test_a_function_registered_twice_runs_twice_and_each_handle_removes_one():
    fun, one = decorated(), plus(1.0)
    handles = [fun.register_hook(one) for _ in range(3)]
    handles[1].remove()
    assert gradient(fun) == 4.5


def test_handles_remove_their_own_hook_and_twice_is_harmless():
    fun = decorated(hook=plus(0.5))
    first, second = fun.register_hook(plus(*FIRST)), fun.register_hook(plus(*SECOND))
    assert first is not second
    first.remove()
    first.remove()
    assert gradient(fun) == 9.0  # 3 * (2.5 + 0.5)
    first.remove()  # there is nothing left to change


# --- Too late -------------------------------------------------------------------------------------

USES = {
    "called": lambda f: f(0.0, X),
    "grad": lambda f: jax.grad(f)(0.0, X),
    "value_and_grad": lambda f: f.value_and_grad()(0.0, X),
    "unreduced": lambda f: gradaccum.unreduced_value_and_grad(f)(0.0, X),
    "jit": lambda f: jax.jit(f).lower(0.0, X),
    "eval_shape": lambda f: jax.eval_shape(jax.value_and_grad(f), 0.0, X),
}


@pytest.mark.parametrize("use", USES)
def test_a_change_after_a_trace_raises_with_the_remedy(use):
    fun = decorated()
    handle = fun.register_hook(plus(1.0))
    USES[use](fun)
    late = (
        r"accumulate: {} after loss_fn was called or traced: a step that is compiled already would "
        r"not see it. Register and remove hooks before the first call, or decorate the loss anew"
    )
    with pytest.raises(ValueError, match=late.format("register_hook")):
        fun.register_hook(plus(1.0))
    with pytest.raises(ValueError, match=late.format("register_post_accumulate_hook")):
        fun.register_post_accumulate_hook(plus_on_mean(1.0))
    with pytest.raises(ValueError, match=late.format("register_comm_hook")):
        fun.register_comm_hook(passes())
    with pytest.raises(ValueError, match=late.format("remove")):
        handle.remove()
    assert gradient(fun) == 3.5


def test_decorating_anew_is_the_remedy_and_leaves_the_first_alone():
    first = decorated()
    assert gradient(first) == 2.5
    assert gradient(decorated(first.__wrapped__, hook=plus(1.0))) == 3.5
    assert gradient(first) == 2.5


def test_making_the_gradient_function_is_no_use_yet():
    fun = decorated()
    grad = jax.jit(jax.grad(fun))
    fun.register_hook(plus(1.0))
    assert grad(0.0, X) == 3.5


def test_a_decorated_loss_that_is_decorated_again_keeps_its_hooks_apart():
    inner = decorated(k=1, hook=plus(7.0))
    outer = decorated(inner)
    outer.register_hook(plus(1.0))
    assert repr(outer) == "<gradaccum.accumulate(loss_fn, microbatches=2)>"
    assert gradient(outer) == 2.5 + 7 + 1
    assert gradient(inner) == 2.5 + 7


# --- Communication hooks: the plumbing ------------------------------------------------------------


def test_one_communication_hook_only():
    fun = decorated(comm_hook=passes())
    with pytest.raises(ValueError, match=r"register_comm_hook\(passes\(\)\), but there is passes"):
        fun.register_comm_hook(passes())
    fun = decorated()
    handle = fun.register_comm_hook(passes())
    with pytest.raises(ValueError, match=r"already, and the mean is taken once. Remove that one"):
        fun.register_comm_hook(passes())
    handle.remove()
    fun.register_comm_hook(passes()).remove()
    assert gradient(fun) == 2.5


@dataclasses.dataclass
class Unhashable:
    """As `passes`, of a dataclass that is not frozen."""

    def init(self, unreduced):
        return ()

    def __call__(self, unreduced, state):
        return unreduced, state


COMM_HOOKS = {
    "class": (passes, r"comm_hook is the class passes; give an instance: comm_hook=passes\(\)"),
    "function": (lambda u, s: (u, s), r"must have init\(unreduced\) -> state and be callable"),
    "no call": (type("Half", (), {"init": lambda self, u: ()})(), r"must have init.*be callable"),
    "no hash": (Unhashable(), r"comm_hook Unhashable is not hashable .*frozen=True"),
}


@pytest.mark.parametrize("name", COMM_HOOKS)
def test_what_is_no_communication_hook_is_refused(name):
    hook, match = COMM_HOOKS[name]
    with pytest.raises(TypeError, match=match):
        decorated(comm_hook=hook)
    with pytest.raises(TypeError, match=match):
        decorated().register_comm_hook(hook)


def test_registering_no_communication_hook_is_refused():
    with pytest.raises(TypeError, match=r"register_comm_hook\(None\).*remove\(\) its handle"):
        decorated().register_comm_hook(None)


def test_a_communication_hook_has_no_place_where_no_mean_is_taken():
    match = r"unreduced_value_and_grad: comm_hook is passes\(\).*MultiSteps or gradaccum.all_reduce"
    with pytest.raises(ValueError, match=match):
        gradaccum.unreduced_value_and_grad(loss_fn, axis_name=None, comm_hook=passes())
    fun = decorated()
    fun.register_comm_hook(passes())
    with pytest.raises(ValueError, match=match):
        gradaccum.unreduced_value_and_grad(fun)(0.0, X)


# --- What is refused ------------------------------------------------------------------------------


class Callable:
    __hash__ = None

    def __call__(self, grads, *, index=0):
        return grads


HOOKS = {
    "no function": (3, {}, r"is 3; it must be a function, called as fn\(grads"),
    "no hash": (Callable(), {}, r"a Callable, has no hash to find its program by"),
    "too few": (lambda: None, {}, r"cannot be called as fn\(grads.*too many positional"),
}


@pytest.mark.parametrize("kind", ["hook", "post_accumulate_hook"])
@pytest.mark.parametrize("name", HOOKS)
def test_what_is_no_hook_is_refused_at_once(kind, name):
    hook, _, match = HOOKS[name]
    for give in (
        lambda: decorated(**{kind: hook}),
        lambda: decorated(**{kind: [plus(1.0) if kind == "hook" else plus_on_mean(1.0), hook]}),
        lambda: getattr(decorated(), f"register_{kind}")(hook),
    ):
        with pytest.raises(TypeError, match=f"accumulate: {kind}.*{match}"):
            give()


def test_a_hook_of_the_other_kind_is_refused_at_once():
    with pytest.raises(TypeError, match=r"cannot be called as fn\(grads, index=index\).*'index'"):
        decorated(hook=plus_on_mean(1.0))
    with pytest.raises(TypeError, match=r"cannot be called as fn\(grads\): missing.*'index'"):
        decorated(post_accumulate_hook=plus(1.0))
    partial = functools.partial(lambda a, grads, *, index: grads, 1)
    assert gradient(decorated(hook=partial)) == 2.5


@pytest.mark.parametrize("kind", ["hook", "post_accumulate_hook"])
def test_a_hook_that_communicates_over_a_data_axis_is_refused(kind):
    def change(grads, index=None):
        del index
        return jax.tree.map(lambda g: g / jax.lax.psum(jnp.sum(g**2), "dp"), grads)

    fun = gradaccum.accumulate(
        loss_fn, microbatches=2, axis_name="dp", mesh=helpers.data_mesh(2), **{kind: change}
    )
    match = rf"accumulate: {kind} communicates over the data axis dp \(psum.*a comm_hook"
    with pytest.raises(ValueError, match=match):
        jax.grad(fun)(0.0, X)
    assert fun(0.0, X) == 0  # nothing is differentiated, so no hook runs


# --- Whose hooks, of which arguments --------------------------------------------------------------


def test_a_methods_hooks_are_those_of_all_instances():
    class Net:
        def __init__(self, scale):
            self.scale = scale

        @gradaccum.accumulate(microbatches=2, axis_name=None, batch_argnums=2)
        def loss(self, w, x):
            return jnp.mean(self.scale * w * x)

    Net.loss.register_hook(plus(1.0))
    Net(1.0).loss.register_hook(plus(*SECOND))
    Net(1.0).loss.register_post_accumulate_hook(plus_on_mean(100.0))
    Net(1.0).loss.register_comm_hook(passes()).remove()
    assert gradient(Net(1.0).loss) == 3 * (2.5 + 1) + 100
    loss, grad = Net(2.0).loss.value_and_grad()(0.0, X)
    assert (float(loss), float(grad)) == (0, 3 * (5 + 1) + 100)
    with pytest.raises(ValueError, match=r"register_hook after .*Net.loss was called or traced"):
        Net.loss.register_hook(plus(1.0))


def test_o15_o24_clipping_the_mean_is_not_clipping_the_parts():
    """CASES O15, O24: microbatches of gradient -1.5, .5, .5, .5, clipped to 1: 0 against 0.125."""
    x = jnp.array([-1.5, 0.5, 0.5, 0.5])
    clip = optax.clip_by_global_norm(1.0)
    clipped = lambda grads: clip.update(grads, clip.init(grads))[0]  # noqa: E731
    each = decorated(k=4, hook=lambda grads, *, index: clipped(grads))
    assert gradient(each, x=x) == 0.125
    mean = decorated(k=4, post_accumulate_hook=clipped)
    assert gradient(mean, x=x) == 0.0
    np.testing.assert_array_equal(clipped(jax.grad(decorated(k=4))(0.0, x)), 0.0)
