"""Linear functions that are each other's transpose, where JAX's own rule would be another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def transposes(
    f: Callable[..., Any], g: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns two functions of an array and static arguments, each the other's backward rule.

    The rules call the functions with rules, so that derivatives of any order are right.
    """
    static = tuple(range(1, f.__code__.co_argcount))
    one, other = (jax.custom_vjp(fun, nondiff_argnums=static) for fun in (f, g))

    def define(this: Any, transpose: Any) -> None:
        def forward(x: Any, *static: Any) -> tuple[Any, None]:
            return this(x, *static), None

        def backward(*args: Any) -> tuple[Any]:
            *static, _, cotangent = args
            return (transpose(cotangent, *static),)

        this.defvjp(forward, backward)

    define(one, other)
    define(other, one)
    return one, other
