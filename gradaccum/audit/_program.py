"""From what the user holds (a function, a program, its text) to HLO text and a mesh."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from gradaccum.audit._flow import Flow
from gradaccum.audit._groups import mesh_clause
from gradaccum.audit._parse import Module, parse
from gradaccum.audit._report import Report, report

AnyMesh = Mesh | AbstractMesh

_MESH_CLAUSE = re.compile(r"replica_groups=(mesh\[[^\]]*\][^{]*\{[^}]*\})")
_COMPILER_NAME = re.compile(r"axis_\d+")


def _compiled(api: str, fn: Any, args: Sequence[Any]) -> jax.stages.Compiled:
    """Compile `fn` unless it already is."""
    if isinstance(fn, jax.stages.Compiled | jax.stages.Lowered):
        if args:
            raise TypeError(
                f"{api}: got {len(args)} arguments beside a {type(fn).__name__} program, which "
                "has its shapes already. Required: the program alone. Drop the arguments, or pass "
                "the jitted function."
            )
        return fn.compile() if isinstance(fn, jax.stages.Lowered) else fn
    if not hasattr(fn, "lower"):
        if not callable(fn):
            raise TypeError(
                f"{api}: got an object of type {type(fn).__name__}. Required: a function, a "
                "jax.stages.Lowered or Compiled, or HLO text."
            )
        fn = jax.jit(fn)
    compiled: jax.stages.Compiled = fn.lower(*args).compile()
    return compiled


def _meshes(compiled: jax.stages.Compiled) -> list[AnyMesh]:
    """The distinct meshes of a program's inputs and outputs, as the user made them."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    found = [s.mesh for s in shardings if isinstance(s, NamedSharding) and s.mesh.axis_names]
    return list(dict.fromkeys(found))


def _from_text(text: str) -> Mapping[str, int]:
    """The user's mesh as jax 0.12 writes it into the text; never the compiler's own names."""
    clauses = (mesh_clause(clause) for clause in _MESH_CLAUSE.findall(text))
    named = [c for c in clauses if c and not any(map(_COMPILER_NAME.fullmatch, c))]
    return named[0] if named and all(clause == named[0] for clause in named) else {}


def _check_order(api: str, mesh: AnyMesh, meshes: Sequence[AnyMesh]) -> None:
    """The groups count devices in the program's order; a mesh in another would misname them."""
    if not isinstance(mesh, Mesh):
        return
    for own in meshes:
        if not isinstance(own, Mesh) or set(own.devices.flat) != set(mesh.devices.flat):
            continue
        if list(own.devices.flat) != list(mesh.devices.flat):
            orders = [[int(d.id) for d in m.devices.flat][:8] for m in (mesh, own)]
            raise ValueError(
                f"{api}: mesh {dict(mesh.shape)} holds its devices in the order {orders[0]}, the "
                f"program's own mesh {dict(own.shape)} in the order {orders[1]}. Required: the "
                "same order. Leave mesh= out, or pass the mesh that the program was made with."
            )


def _choose(
    api: str, text: str, mesh: AnyMesh | None, meshes: Sequence[AnyMesh], wanted: Sequence[str]
) -> Mapping[str, int]:
    if mesh is not None:
        _check_order(api, mesh, meshes)
        return dict(mesh.shape)
    fitting = [m for m in meshes if set(wanted) <= set(m.axis_names)] or list(meshes)
    if fitting:
        return dict(max(fitting, key=lambda m: len(m.axis_names)).shape)
    return _from_text(text)


def _positions(mesh: AnyMesh | None, meshes: Sequence[AnyMesh]) -> Mapping[int, int]:
    """Device id -> position in the mesh, of the first mesh that has devices."""
    for each in [mesh, *meshes]:
        if isinstance(each, Mesh):
            return {int(device.id): i for i, device in enumerate(each.devices.flat)}
    return {}


def _text(api: str, compiled: jax.stages.Compiled) -> str:
    """The program's text; a compiler may not be able to give it."""
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{api}: the compiler cannot write the text of this program ({reason[:200]}). "
            "Required: a program whose compiled.as_text() returns; libtpu has none for tpu7x, and "
            "not for every program for v6e. Compile for another chip, or with another libtpu."
        ) from error


def read(
    api: str, fn: Any, args: Sequence[Any], mesh: AnyMesh | None, wanted: Sequence[str] = ()
) -> tuple[Module, Flow, Report]:
    """Compile, parse, walk and tabulate.

    Args:
      api: the public function's name, for messages.
      fn: a function, a lowered or compiled program, or HLO text.
      args: the function's arguments.
      mesh: the user's mesh, or None: the program's own.
      wanted: axes that the mesh should have, where the program has several meshes.

    Raises:
      TypeError, ValueError: as the public functions say.
    """
    meshes: list[AnyMesh] = []
    if isinstance(fn, str):
        if args:
            raise TypeError(
                f"{api}: got {len(args)} arguments beside HLO text. Required: the text alone."
            )
        text = fn
    else:
        compiled = _compiled(api, fn, args)
        meshes = _meshes(compiled)
        text = _text(api, compiled)
    module = dataclasses.replace(parse(text), positions=_positions(mesh, meshes))
    axes = _choose(api, text, mesh, meshes, wanted)
    devices, local = math.prod(axes.values()), module.num_devices
    several_slices = "_xla_megascale" in text and devices % local == 0
    if axes and devices != local and not several_slices:
        sizes = ", ".join(f"{name}={size}" for name, size in axes.items())
        raise ValueError(
            f"{api}: mesh ({sizes}) has {devices} devices, but program {module.name} runs on "
            f"{module.num_replicas} replicas * {module.num_partitions} partitions = {local}. "
            "Required: the mesh that the program was compiled for, passed as mesh=; and arguments "
            "with the shardings of the real ones, since others compile for one device."
        )
    flow = Flow(module)
    return module, flow, report(module, flow, axes)
