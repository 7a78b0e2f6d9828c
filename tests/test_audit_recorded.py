"""`audit` on what other compilers wrote, for devices that are not here.

The files in audit_fixtures/ are real: jax 0.10.2 with libtpu 0.0.52 for v3:2x2 and v5e:2x4 (one,
two and four slices), and with the CUDA 12 plugin for eight H100s. Layouts, names and operands are
as compiled; most of backend_config and the source positions were cut.
"""

import pathlib
import re

import pytest
from jax.sharding import AbstractMesh

from gradaccum import audit

FIXTURES = pathlib.Path(__file__).parent / "audit_fixtures"


def recorded(name, **axes):
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    return (FIXTURES / f"{name}.txt").read_text(), mesh


def summary(report):
    return [(row.kind, row.axes, row.dtype, row.shapes, row.executions) for row in report]


def test_tpu_loops_have_their_count_in_the_condition():
    text, mesh = recorded("tpu_v3_naive", dp=8)
    assert "known_trip_count" not in text
    assert summary(audit.collectives(text, mesh=mesh)) == [
        ("all-to-all", ("dp",), "f32", ("f32[8,2,256]",), 1),
        ("all-reduce", ("dp",), "f32", ("f32[]",), 64),
        ("all-reduce", ("dp",), "f32", ("f32[1,64,64]",), 64 * 16),
    ]
    with pytest.raises(AssertionError, match=r"f32\[1,64,64\] over dp .* 64 x 16 = 1,024 times"):
        audit.assert_one_reduction(text, axis_name="dp", mesh=mesh)


def test_the_parts_of_a_tpu_async_fusion_are_one_operation():
    text, mesh = recorded("tpu_v5e_async_gather", dp=8)
    assert len(re.findall(r'chain_id="0"', text)) == 5
    report = audit.collectives(text, mesh=mesh)
    kinds = [row.kind for row in report]
    # Four layers: one gather and one scatter each, and the loss.
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "all-gather": 4,
        "reduce-scatter": 4,
        "all-reduce": 1,
    }
    gathers = [row for row in report if row.kind == "all-gather"]
    assert {(row.shapes, row.bytes) for row in gathers} == {(("bf16[256,2048]",), 2 * 2048**2)}
    audit.assert_one_reduction(text, axis_name="dp", mesh=mesh)


def test_a_send_between_tpu_slices_is_a_reduction_of_the_slice_axis():
    text, mesh = recorded("tpu_v5e_two_slices", r=2, dp=8)
    assert summary(audit.collectives(text, mesh=mesh)) == [
        ("reduce-scatter", ("dp",), "f32", ("f32[256,1024]",), 1),
        ("send", ("r",), "f32", ("f32[32,8,128]",), 1),
        ("all-gather", ("dp",), "f32", ("f32[32,1024]",), 1),
    ]
    audit.assert_one_reduction(text, axis_name=("r", "dp"), mesh=mesh)


def test_a_small_array_is_padded_before_it_is_sent():
    text, mesh = recorded("tpu_v5e_two_slices_padded", r=2, dp=16)
    assert "ZeroCrop" in text
    audit.assert_one_reduction(text, axis_name=("r", "dp"), mesh=mesh)


def test_a_send_between_some_slices_names_their_axis_only():
    text, mesh = recorded("tpu_v5e_four_slices", a=2, r=2, dp=8)
    assert [row.axes for row in audit.collectives(text, mesh=mesh)] == [("dp",), ("r",), ("dp",)]
    audit.assert_one_reduction(text, axis_name=("r", "dp"), mesh=mesh)
    with pytest.raises(AssertionError, match=r"no gradient is reduced over a=2"):
        audit.assert_one_reduction(text, axis_name=("a", "r", "dp"), mesh=mesh)


def test_a_send_that_only_gathers_reduces_nothing():
    text, mesh = recorded("tpu_v5e_two_slices", r=2, dp=8)
    text = text.replace('transfer_type="ALL_REDUCE"', 'transfer_type="ALL_GATHER"')
    with pytest.raises(AssertionError, match=r"no gradient is reduced over r=2: of 1 operations"):
        audit.assert_one_reduction(text, axis_name=("r", "dp"), mesh=mesh)


def test_gpu_async_forms_and_annotated_trip_counts():
    text, mesh = recorded("gpu_h100_naive", dp=8)
    assert "all-reduce-start" in text
    executions = {
        (row.kind, row.shapes): row.executions for row in audit.collectives(text, mesh=mesh)
    }
    assert executions == {
        ("all-to-all", ("f32[8,8,1,64]",)): 1,
        ("all-reduce", ("f32[64,64]",)): 64 * 16,
        ("all-reduce", ("f32[]",)): 64,
    }


def test_gpu_kinds_are_listed_once_and_their_bytes_are_those_of_the_sync_forms():
    text, mesh = recorded("gpu_h100_kinds", dp=8)
    operand = 4 * 64 * 64
    assert {(row.kind, row.bytes) for row in audit.collectives(text, mesh=mesh)} == {
        ("collective-permute", operand),
        ("all-gather", 8 * operand),
        ("all-to-all", operand),
        ("reduce-scatter", operand),
    }
    with pytest.raises(AssertionError, match=r"all-gather-start .* that every device then sums"):
        audit.assert_one_reduction(text, axis_name="dp", mesh=mesh)


def test_gpu_fsdp_passes():
    text, mesh = recorded("gpu_h100_fsdp", dp=8)
    audit.assert_one_reduction(text, axis_name="dp", mesh=mesh)
    kinds = sorted(row.kind for row in audit.collectives(text, mesh=mesh))
    assert kinds == ["all-gather", "all-reduce", "reduce-scatter"]
