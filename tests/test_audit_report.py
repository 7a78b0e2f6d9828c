"""`audit.collectives`: rows, the table, what it takes as a program, and its errors."""

import dataclasses
import doctest
import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audit_fixtures.programs import (
    GRAD,
    D,
    arguments,
    compiled,
    every_kind_program,
    loss,
    mesh_of,
    program,
    shaped,
)
from jax.sharding import Mesh

from gradaccum import audit


def test_kinds_axes_and_bytes():
    rows = audit.collectives(every_kind_program(mesh_of(dp=4, mp=2)))
    operand = 4 * 8 * D
    assert {(row.kind, row.bytes) for row in rows} == {
        ("all-reduce", operand),
        ("reduce-scatter", operand),
        ("all-gather", 4 * operand),  # the result's
        ("all-to-all", operand),
        ("collective-permute", operand),
    }
    assert {row.axes for row in rows} == {("dp",)}
    assert {row.dtype for row in rows} == {"f32"}
    assert {row.executions for row in rows} == {1}
    assert {row.group_size for row in rows if row.kind != "collective-permute"} == {4}
    assert all(
        row.op_name.endswith(("psum", "scatter", "gather", "all_to_all", "ppermute"))
        for row in rows
    )
    quarter = operand // 4  # every device keeps its own part; an all-reduce is a scatter and gather
    assert {row.kind: row.wire_bytes for row in rows} == {
        "all-reduce": 6 * quarter,
        "reduce-scatter": 3 * quarter,
        "all-gather": 12 * quarter,
        "all-to-all": 3 * quarter,
        "collective-permute": operand,
    }
    assert rows.totals == {"dp": audit.Total(5, bytes=8 * operand, wire_bytes=7 * operand)}


def test_the_table_is_aligned_and_totals_each_axis():
    mesh = mesh_of(dp=4, mp=2)

    def step(params, x):
        def body(carry, rows):
            return carry + jax.lax.psum(rows, "mp").sum(), None

        total = jax.lax.scan(body, jnp.zeros(()), x.reshape(16, 1, D))[0]
        return jax.lax.psum((GRAD(params, x), total), ("dp", "mp"))

    report = audit.collectives(program(step, mesh))
    text = str(report)
    assert text == repr(report) == f"{report}"
    lines = text.splitlines()
    assert lines[0] == "jit_step: 2 collectives on 8 devices, mesh dp=4, mp=2"
    header, first, second = lines[1:4]
    for name in ("kind", "axes", "dtype", "branch", "op"):
        column = header.index(name)
        assert header[column - 1] == " " or column == 0
        assert all(line[column - 1] == " " for line in (first, second) if column)
    for name in ("arrays", "bytes", "executions"):  # numbers stand right
        end = header.index(name) + len(name)
        assert all(line[end - 1].isdigit() and line[end] == " " for line in (first, second))
    tree = 4 * (2 * (D * D + D) + 1)
    assert re.search(r"^all-reduce +mp +f32 +1 +64 +16 ", first)
    assert re.search(rf"^all-reduce +dp,mp +f32 +5 +{tree:,} +1 ", second)
    sent = 2 * 7 * tree // 8
    assert lines[4:] == [
        f"total over dp: executions 1, bytes {tree:,}, sent by each device {sent:,}",
        f"total over mp: executions 17, bytes {tree + 16 * 64:,}, "
        f"sent by each device {sent + 16 * 64:,}",
    ]


def test_a_report_is_a_sequence_of_frozen_rows():
    report = audit.collectives(every_kind_program(mesh_of(dp=4, mp=2)))
    assert len(report) == 5
    assert list(report) == list(report.rows) == [report[i] for i in range(5)]
    assert report[1:3] == report.rows[1:3]
    assert report.over("dp") == report.rows
    assert report.over("mp") == ()
    with pytest.raises(dataclasses.FrozenInstanceError):
        report[0].bytes = 0


def test_nothing_to_say_is_said():
    report = audit.collectives(jax.jit(lambda x: x + 1), jnp.ones(3))
    assert len(report) == 0
    assert str(report) == "jit__lambda: 0 collectives on 1 devices, mesh unknown"
    assert report.totals == {}


def test_groups_of_one_device_move_nothing():
    mesh = jax.make_mesh((8, 1), ("dp", "mp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    text = every_kind_program(mesh_of(dp=4, mp=2)).as_text()
    alone = re.sub(
        r"replica_groups=(\{\{.*?\}\}|mesh\[.*?\] \{.*?\})", "replica_groups=[8,1]<=[8]", text
    )
    rows = audit.collectives(alone, mesh=mesh)
    assert [row.kind for row in rows] == ["collective-permute"]


@pytest.mark.parametrize("form", ["jitted", "plain", "lowered", "compiled", "text"])
def test_every_form_of_a_program_gives_the_same_rows(form):
    mesh = mesh_of(dp=8)
    args = arguments(mesh, "dp")
    step = jax.value_and_grad(loss)
    jitted = jax.jit(step)
    lowered = jitted.lower(*args)
    want = audit.collectives(lowered.compile())
    got = {
        "jitted": lambda: audit.collectives(jitted, *args),
        "plain": lambda: audit.collectives(step, *args),
        "lowered": lambda: audit.collectives(lowered),
        "compiled": lambda: audit.collectives(lowered.compile(), mesh=mesh),
        "text": lambda: audit.collectives(lowered.compile().as_text(), mesh=mesh),
    }[form]()
    assert got.rows == want.rows
    assert len(want) > 0
    assert got.mesh == want.mesh == {"dp": 8}


def test_real_arrays_with_shardings_do_as_well_as_shapes():
    mesh = mesh_of(dp=8)
    shapes = arguments(mesh, "dp")
    arrays = jax.tree.map(lambda s: jax.device_put(jnp.ones(s.shape), s.sharding), shapes)
    step = jax.jit(jax.grad(loss))
    assert audit.collectives(step, *arrays).rows == audit.collectives(step, *shapes).rows


def test_without_a_mesh_axes_are_not_guessed():
    made = every_kind_program(mesh_of(dp=4, mp=2))
    text = re.sub(r"mesh\['dp'=4,'mp'=2\] \{'dp'\}", "{{0,2,4,6},{1,3,5,7}}", made.as_text())
    report = audit.collectives(text)
    assert {row.axes for row in report} == {("?",)}
    assert "mesh unknown" in str(report)
    assert re.search(r"^all-reduce +\? \(groups of 4\) +f32 ", str(report), re.MULTILINE)
    assert re.search(r"^total over \?: executions 5, bytes", str(report), re.MULTILINE)


def test_the_users_names_in_the_text_are_used_and_the_compilers_are_not():
    text = every_kind_program(mesh_of(dp=4, mp=2)).as_text()
    groups = r"replica_groups=(\{\{.*?\}\}|mesh\[.*?\] \{.*?\})"
    named = re.sub(groups, "replica_groups=mesh['dp'=4,'mp'=2] {'dp'}", text)
    assert {row.axes for row in audit.collectives(named)} == {("dp",)}
    generic = re.sub(groups, "replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", text)
    assert {row.axes for row in audit.collectives(generic)} == {("?",)}


def test_a_permuted_device_order_is_the_meshs_own():
    devices = np.array(jax.devices())[[3, 1, 0, 2, 7, 5, 6, 4]].reshape(4, 2)
    mesh = Mesh(devices, ("dp", "mp"))
    report = audit.collectives(every_kind_program(mesh))
    assert {row.axes for row in report} == {("dp",)}
    assert {row.kind for row in report} >= {"all-reduce", "collective-permute"}


@pytest.mark.parametrize("axes", [("r",), ("dp",), ("mp",), ("r", "mp"), ("mp", "r"), ("dp", "r")])
def test_plain_jit_reductions_name_the_axes_of_the_sharding(axes):
    # XLA names its own meshes here, with the devices in an order of their own.
    mesh = mesh_of(r=2, dp=2, mp=2)
    (row,) = audit.collectives(compiled(lambda x: x.sum(0), shaped((64, D), mesh, axes)))
    assert (row.kind, set(row.axes), row.group_size) == ("all-reduce", set(axes), 2 ** len(axes))


def test_of_two_meshes_the_one_with_the_wanted_axis_names_the_groups():
    flat, square = mesh_of(dp=8), mesh_of(r=2, dp=4)

    def f(a, b):
        return a.sum(0), b.sum(0)

    args = shaped((64, D), flat, "dp"), shaped((64, D), square, ("r", "dp"))
    made = compiled(f, *args)
    assert audit.collectives(made).mesh == {"r": 2, "dp": 4}
    assert audit.collectives(made, mesh=flat).over("dp")
    audit.assert_one_reduction(made, axis_name=("r", "dp"))


def test_a_mesh_of_another_size_is_an_error():
    made = every_kind_program(mesh_of(dp=4, mp=2))
    small = jax.make_mesh(
        (2, 2),
        ("dp", "mp"),
        axis_types=(jax.sharding.AxisType.Auto,) * 2,
        devices=jax.devices()[:4],
    )
    with pytest.raises(
        ValueError,
        match=r"audit.collectives: mesh \(dp=2, mp=2\) has 4 devices, but program jit_every_kind "
        r"runs on 1 replicas \* 8 partitions = 8\. Required",
    ):
        audit.collectives(made, mesh=small)


def test_a_mesh_in_another_device_order_is_an_error():
    made = every_kind_program(mesh_of(dp=4, mp=2))
    turned = Mesh(np.array(jax.devices()).reshape(2, 4).T, ("dp", "mp"))
    with pytest.raises(
        ValueError,
        match=r"mesh \{'dp': 4, 'mp': 2\} holds its devices in the order "
        r"\[0, 4, 1, 5, 2, 6, 3, 7\], the program's own mesh \{'dp': 4, 'mp': 2\} in the order "
        r"\[0, 1, 2, 3, 4, 5, 6, 7\]",
    ):
        audit.collectives(made, mesh=turned)


@pytest.mark.parametrize(
    ("axis_name", "names"), [("dq", "dq"), (("dp", "x", "y"), "x, y"), ((), "none given")]
)
def test_an_unknown_axis_is_an_error(axis_name, names):
    made = every_kind_program(mesh_of(dp=4, mp=2))
    count = 0 if names == "none given" else names.count(",") + 1
    with pytest.raises(
        ValueError,
        match=rf"audit.assert_one_reduction: axis_name=.* names {count} axes that program "
        rf"jit_every_kind does not have \({names}\); it has dp=4, mp=2\. Required",
    ):
        audit.assert_one_reduction(made, axis_name=axis_name)


def test_a_program_without_any_mesh_cannot_be_asserted():
    with pytest.raises(ValueError, match=r"does not have \(dp\); it has no known mesh\. Required"):
        audit.assert_one_reduction(lambda x: x + 1, jnp.ones(3), axis_name="dp")


@pytest.mark.parametrize("form", ["lowered", "compiled", "text"])
def test_arguments_beside_a_program_are_an_error(form):
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    program_ = {
        "lowered": lowered,
        "compiled": lowered.compile(),
        "text": lowered.compile().as_text(),
    }[form]
    kind = {"lowered": "a Lowered program", "compiled": "a Compiled program", "text": "HLO text"}
    with pytest.raises(TypeError, match=rf"got 2 arguments beside {kind[form]}"):
        audit.collectives(program_, 1, 2)


def test_stablehlo_is_not_hlo():
    text = jax.jit(lambda x: x + 1).lower(jnp.ones(3)).as_text()
    with pytest.raises(
        ValueError,
        match=rf"got text of {len(text)} characters without an 'HloModule' line \(StableHLO",
    ):
        audit.collectives(text)


def test_cut_text_is_an_error():
    text = every_kind_program(mesh_of(dp=4, mp=2)).as_text()
    with pytest.raises(ValueError, match=r"HLO module jit_every_kind has \d+ computations and no"):
        audit.collectives(text[: text.index("\n", text.index("ENTRY"))])
    with pytest.raises(ValueError, match=r"not an HLO instruction: '%cut = f32\["):
        audit.collectives(text.replace("\n}\n", "\n  %cut = f32[\n}\n", 1))


def test_what_is_no_program_is_an_error():
    with pytest.raises(
        TypeError, match=r"audit.collectives: got an object of type int\. Required: a function"
    ):
        audit.collectives(7)


def test_public_names_are_documented():
    for name in ("collectives", "assert_one_reduction", "Collective", "Report", "Total"):
        assert len(getattr(audit, name).__doc__) > 40
    fields = {field.name for field in dataclasses.fields(audit.Collective)}
    assert all(f"{field}:" in audit.Collective.__doc__ for field in fields)


@pytest.mark.parametrize("module", ["_audit", "_report"])
def test_the_examples_in_the_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"gradaccum.audit.{module}"))
    assert result.attempted > 5
    assert result.failed == 0
