"""What `stack` and `unstack` say of shapes, sizes, axes and specs that cannot be right."""

import pytest
from helpers import numbers
from jax.sharding import PartitionSpec as P

from gradaccum.tensor_parallel import stack, unstack


def message_of(error, fun, *args):
    with pytest.raises(error) as caught:
        fun(*args)
    return str(caught.value)


def test_a_dimension_that_m_does_not_divide():
    tree = {"w": numbers(3, 6), "b": numbers(5), "c": numbers(5)}
    specs = {"w": P(None, "mp"), "b": P("mp"), "c": P()}
    assert message_of(ValueError, stack, tree, specs, "mp", 4) == (
        "stack: ['b'] has shape (5,); axis 0 (5) is not divisible by the 4 devices along 'mp': pad "
        "it to 8; ['w'] has shape (3, 6); axis 1 (6) is not divisible by the 4 devices along "
        "'mp': pad it to 8, or leave it replicated."
    )


def test_leading_sizes_that_differ():
    tree = {"w": numbers(2, 3), "b": numbers(4)}
    assert message_of(ValueError, unstack, tree, {"w": P("mp"), "b": P()}, "mp") == (
        "unstack: leading sizes differ: ['b'] (4,), ['w'] (2, 3). Every leaf must be [m, *local], "
        "replicated ones too."
    )


def test_a_dimension_that_the_leaf_does_not_have():
    assert message_of(ValueError, stack, numbers(2), P(None, "mp"), "mp", 2) == (
        f"stack: tree has shape (2,) and spec {P(None, 'mp')}, which has more dimensions."
    )
    assert message_of(ValueError, unstack, {"w": numbers(2)}, P("mp"), "mp") == (
        f"unstack: ['w'] has shape (2,) and spec {P('mp')}, which has more dimensions "
        "than [m, *local]."
    )
    assert "tree has shape () and spec" in message_of(ValueError, unstack, 1.0, None, "mp")


BAD_SPECS = {
    "twice": (P("mp", "mp"), "mp"),
    "twice in one dimension": (P(("mp", "mp")), "mp"),
    "behind another": (P(("fsdp", "mp")), "mp"),
    "one of two": (P("a"), ("a", "b")),
    "two in another order": (P(("b", "a")), ("a", "b")),
    "in two dimensions": (P("a", "b"), ("a", "b")),
}


@pytest.mark.parametrize("case", BAD_SPECS)
def test_specs_that_do_not_name_the_axis_as_it_must_be(case):
    spec, axis = BAD_SPECS[case]
    for api, message in (
        ("stack", message_of(ValueError, stack, {"w": numbers(4, 4)}, spec, axis, 2)),
        ("unstack", message_of(ValueError, unstack, {"w": numbers(4, 4, 4)}, spec, axis)),
    ):
        shape = (4, 4) if api == "stack" else (4, 4, 4)
        assert message == (
            f"{api}: ['w'] has shape {shape} and spec {spec}, which must name {axis!r} first in "
            "one dimension, or nowhere."
        )


@pytest.mark.parametrize("axis", [None, (), ("a", "a")], ids=str)
def test_no_axis_and_one_axis_twice(axis):
    needed = f"got axis_name={axis!r}, needed a mesh axis or a tuple of different ones."
    assert message_of(ValueError, stack, {}, None, axis, 2) == f"stack: {needed}"
    assert message_of(ValueError, unstack, {}, None, axis) == f"unstack: {needed}"


@pytest.mark.parametrize("fun", [lambda *x: stack(*x, 2), unstack], ids=["stack", "unstack"])
def test_specs_that_are_no_prefix(fun):
    tree = {"a": numbers(2, 2), "b": numbers(2, 2)}
    message = message_of(ValueError, fun, tree, {"a": P("mp"), "c": P()}, "mp")
    assert "stack: specs is not a pytree prefix of its argument" in message
    assert "it has nothing for ['b']; the argument has no ['c']" in message
    message = message_of(TypeError, fun, tree, {"a": "mp", "b": P()}, "mp")
    assert "stack: specs holds 'mp'; its leaves must be jax.sharding.PartitionSpec" in message


def test_sizes():
    for size in (0, -2):
        assert message_of(ValueError, stack, {}, None, "mp", size) == (
            f"stack: size is {size}; it must be >= 1, the devices along mp."
        )
    for size in (2.0, "2", None):
        assert message_of(TypeError, stack, {}, None, "mp", size) == (
            f"stack: size is {size!r}; it must be an int, the number of devices along mp."
        )
