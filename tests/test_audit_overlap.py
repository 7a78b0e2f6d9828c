"""`Collective.overlaps`: what computes between the start and the done of an operation."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from audit_fixtures import record
from audit_fixtures.async_text import DONE, GROUPS, HEAD, START, hand
from audit_fixtures.programs import compiled, mesh_of
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gradaccum import audit

MESH = AbstractMesh((8,), ("dp",))


def recorded(name, mesh=MESH):
    return audit.collectives(record.read(name), mesh=mesh)


@pytest.mark.parametrize("jax_version", ["", "_jax12"])
def test_with_overlap_each_reduction_but_the_last_runs_beside_a_matmul(jax_version):
    peeled = recorded(f"overlap_h100{jax_version}")
    control = recorded(f"no_overlap_h100{jax_version}")
    sizes = [16_777_216, 16_777_220, 16_777_216]  # a layer of 2048 each; the loss rides in one
    for report in (peeled, control):
        assert [(row.kind, row.bytes, row.executions) for row in report] == [
            ("all-reduce", size, 1) for size in sizes
        ]
    products = [row.overlaps.count("matmul") for row in peeled]
    assert products == [1, 1, 0]  # of the first layer's gradient nothing is left to compute
    assert not any("matmul" in (row.overlaps or ()) for row in control)
    assert control[0].overlaps == ()
    # The other layers' updates need no mean of this one.
    assert peeled[2].overlaps == control[2].overlaps == ("fusion", "fusion")


def test_the_parts_of_a_tpu_async_fusion_compute():
    report = recorded("tpu_v5e_async_gather")
    assert [row.overlaps for row in report] == [*[None] * 3, ("matmul",) * 3, *[None] * 5]


def test_what_computes_before_the_answer_of_the_other_slices():
    mesh = AbstractMesh((2, 8), ("replica", "dp"))
    report = recorded("train_fsdp_v5e_two_slices", mesh)
    for row in report:
        assert (row.overlaps is None) == (row.kind != "send")
    hidden = [row.overlaps for row in report if row.kind == "send"]
    assert () in hidden
    assert {label for labels in hidden for label in labels} == {"fusion"}


############################################# By hand ############################################


def overlaps(*lines, **parts):
    (row,) = audit.collectives(hand(*lines, **parts), mesh=MESH)
    return row.overlaps


@pytest.mark.parametrize(
    ("line", "label"),
    {
        "dot": ("dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "matmul"),
        "convolution": ("convolution(%x, %x), dim_labels=bf_io->bf", "matmul"),
        "cublas": ('custom-call(%x, %x), custom_call_target="__cublas$gemm"', "matmul"),
        "cublasLt": ('custom-call(%x, %x), custom_call_target="__cublas$lt$matmul$f8"', "matmul"),
        "cudnn": ('custom-call(%x), custom_call_target="__cudnn$convForward"', "matmul"),
        "fused product": ("fusion(%x, %x), kind=kOutput, calls=%product", "matmul"),
        "call of one": ("call(%x, %x), to_apply=%wrapped", "matmul"),
        "fusion": ("fusion(%x, %x), kind=kLoop, calls=%twice", "fusion"),
        "kernel": ('custom-call(%x), custom_call_target="tpu_custom_call"', "tpu_custom_call"),
        "unfused": ("reduce(%x, %x), dimensions={0}, to_apply=%sum", "reduce"),
        "memory": ('custom-call(), custom_call_target="AllocateBuffer"', None),
        "fused moves": ("fusion(%x, %x), kind=kLoop, calls=%turned", None),
        "copy": ("copy(%x)", None),
        "other collective": (f"all-gather(%x), {GROUPS}, dimensions={{0}}", None),
    }.values(),
    ids=lambda value: str(value).partition(" ")[0][:24],
)
def test_what_counts_as_computing(line, label):
    text = hand(START, f"%y = f32[8,8] {line}", DONE)
    row = next(r for r in audit.collectives(text, mesh=MESH) if r.kind == "all-reduce")
    assert row.overlaps == ((label,) if label else ())


@pytest.mark.parametrize(
    ("line", "label"),
    [
        ("%w = (s32[], f32[8,8]) while(%t), condition=%go, body=%body", "while"),
        ("%w = (s32[], f32[8,8]) while(%t), condition=%go, body=%idle", None),
        (
            "%w = (s32[], f32[8,8]) conditional(%i, %t, %t), branch_computations={%idle, %body}",
            "conditional",
        ),
        (
            "%w = (s32[], f32[8,8]) conditional(%b, %t, %t), true_computation=%body, "
            "false_computation=%idle",
            "conditional",
        ),
        ("%w = (s32[], f32[8,8]) conditional(%i, %t), branch_computations={%idle}", None),
        ("%w = s32[] add(%i, %i)", None),
    ],
)
def test_loops_branches_and_scalars(line, label):
    before = ["%i = s32[] constant(1)", "%b = pred[] constant(true)"]
    before.append("%t = (s32[], f32[8,8]) tuple(%i, %x)")
    assert overlaps(*before, START, line, DONE) == ((label,) if label else ())


def test_only_what_stands_between_counts_in_its_order():
    product = "f32[8,8] fusion(%x, %x), kind=kOutput, calls=%product"
    other = "f32[8,8] fusion(%x, %x), kind=kLoop, calls=%twice"
    lines = f"%p = {product}", START, f"%q = {other}", f"%r = {product}", DONE, f"%u = {other}"
    assert overlaps(*lines) == ("fusion", "matmul")
    unscheduled = HEAD.replace(", is_scheduled=true", "")
    assert overlaps(*lines, head=unscheduled) is None
    at_once = START + ', backend_config={"collective_backend_config":{"is_sync":true}}'
    assert overlaps(*(at_once if line == START else line for line in lines)) is None
    sync = START.replace("all-reduce-start", "all-reduce")
    assert overlaps(*(sync if line == START else line for line in lines[:-2])) is None


def test_a_wrapped_operation_with_an_update():
    carried = "((f32[8,8]), f32[1,8], s32[])"
    lines = [
        f"%s = {carried} async-start(%x), calls=%scatter",
        "%p = f32[8,8] fusion(%x, %x), kind=kOutput, calls=%product",
        f"%u = {carried} async-update(%s)",
        "%q = f32[8,8] fusion(%x, %x), kind=kLoop, calls=%twice",
        "%d = f32[1,8] async-done(%u)",
    ]
    assert overlaps(*lines) == ("matmul", "fusion")


def test_in_a_loop_and_in_its_branch():
    inside = "\n  ".join(
        [
            "%other (x: f32[8,8]) -> f32[8,8] {",
            "%x = f32[8,8] parameter(0)",
            START,
            "%p = f32[8,8] fusion(%x, %x), kind=kOutput, calls=%product",
            DONE,
            "ROOT %end = f32[8,8] copy(%d)",
        ]
    )
    around = """
}

%around (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p = (s32[], f32[8,8]) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %m = f32[8,8] get-tuple-element(%p), index=1
  %c = f32[8,8] conditional(%n, %m, %m), branch_computations={%none, %other}
  ROOT %t = (s32[], f32[8,8]) tuple(%n, %c)
}

%none (x: f32[8,8]) -> f32[8,8] {
  ROOT %x = f32[8,8] parameter(0)
}
"""
    zero = "%i = s32[] constant(0)", "%t = (s32[], f32[8,8]) tuple(%i, %x)"
    loop = "%w = (s32[], f32[8,8]) while(%t), condition=%go, body=%around"
    (row,) = audit.collectives(hand(*zero, loop, extra=inside + around), mesh=MESH)
    assert (row.overlaps, row.conditional, row.executions) == (("matmul",), True, None)


def test_a_done_in_the_next_iteration_is_not_guessed():
    pipelined = f"""%around (p: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %p = (s32[], f32[8,8]) parameter(0)
  %n = s32[] get-tuple-element(%p), index=0
  %x = f32[8,8] get-tuple-element(%p), index=1
  %d = f32[8,8] all-reduce-done(%x)
  {START.replace("(%x)", "(%d)")}
  %e = f32[8,8] dot(%d, %d), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %t = (s32[], f32[8,8]) tuple(%n, %s)
}}

"""
    zero = "%i = s32[] constant(0)", "%t = (s32[], f32[8,8]) tuple(%i, %x)"
    loop = "%w = (s32[], f32[8,8]) while(%t), condition=%go, body=%around"
    assert overlaps(*zero, loop, extra=pipelined) is None


def test_two_async_fusions_of_one_chain_in_a_row():
    def part(name, begins):
        flag = "-1" if begins else "0"
        return (
            f"%{name} (p: f32[8,8]) -> f32[8,8] {{\n  %p = f32[8,8] parameter(0)\n"
            f"  ROOT %g = f32[8,8] all-reduce(%p), {GROUPS}, to_apply=%sum, frontend_attributes="
            f'{{chain_id="0"}}, backend_config={{"async_collective_fusion_config":'
            f'{{"flag_start":"{flag}"}}}}\n}}\n\n'
        )

    extra = part("begin", True) + part("end", False)
    product = "f32[8,8] fusion(%x, %x), kind=kOutput, calls=%product"
    lines = [
        "%s = f32[8,8] fusion(%x), kind=kCustom, calls=%begin",
        f"%p = {product}",
        "%d = f32[8,8] fusion(%s), kind=kCustom, calls=%end",
        f"%q = {product}",
        "%s2 = f32[8,8] fusion(%d), kind=kCustom, calls=%begin",
        "%d2 = f32[8,8] fusion(%s2), kind=kCustom, calls=%end",
    ]
    report = audit.collectives(hand(*lines, extra=extra), mesh=MESH)
    assert [row.overlaps for row in report] == [("matmul",), ()]


########################################### The report ###########################################


def test_the_table_has_the_column_only_where_something_is_asynchronous():
    product = "f32[8,8] fusion(%x, %x), kind=kOutput, calls=%product"
    report = audit.collectives(
        hand(
            START,
            f"%p = {product}",
            "%o = f32[8,8] fusion(%x, %x), kind=kLoop, calls=%twice",
            f"%q = {product}",
            DONE,
            START.replace("%s =", "%s2 ="),
            DONE.replace("%d", "%d2").replace("%s", "%s2"),
            f"%g = f32[64,8] all-gather(%x), {GROUPS}, dimensions={{0}}",
        ),
        mesh=MESH,
    )
    lines = str(report).splitlines()
    start = lines[1].index("overlaps")
    assert lines[1][start:].split() == ["overlaps", "op"]
    cells = [line[start : start + len("2 matmul, 1 fusion")].strip() for line in lines[2:5]]
    assert cells == ["2 matmul, 1 fusion", "nothing", ""]
    kept = json.loads(json.dumps([dataclasses.asdict(row) for row in report]))
    assert [row["overlaps"] for row in kept] == [["matmul", "fusion", "matmul"], [], None]

    mesh = mesh_of(dp=8)
    rows = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh, P("dp")))
    sync = audit.collectives(compiled(lambda x: x.sum(0), rows))
    assert [row.overlaps for row in sync] == [None]
    assert "overlaps" not in str(sync)
