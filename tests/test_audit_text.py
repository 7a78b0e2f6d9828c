"""`audit` on hand-written text: forms of HLO that a small CPU program has not."""

import jax
import pytest
from audit_fixtures.programs import D, mesh_of, shaped
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from gradaccum import audit


def summary(report):
    return [(row.kind, row.axes, row.dtype, row.shapes, row.executions) for row in report]


REDUCE = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true, to_apply=%sum"
HEAD = """HloModule hand, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %r = f32[] add(%a, %b)
}
"""


def module(body, *computations, head=HEAD):
    """A module whose entry has the given lines after x: f32[4,8]; parts are (name, lines)."""
    parts = [
        f"%{name} (p: f32[4,8]) -> f32[4,8] {{\n  %p = f32[4,8]{{1,0}} parameter(0)\n{lines}\n}}\n"
        for name, lines in computations
    ]
    entry = "ENTRY %main (x: f32[4,8]) -> f32[4,8] {\n  %x = f32[4,8]{1,0} parameter(0)\n"
    return "\n".join([head, *parts, entry + body + "\n}\n"])


REDUCED = ("reduced", f"  ROOT %ar = f32[4,8]{{1,0}} all-reduce(%p), {REDUCE}")


def test_a_computation_called_from_two_places_runs_twice():
    text = module(
        "  %one = f32[4,8]{1,0} call(%x), to_apply=%reduced\n"
        "  %half = f32[4,8]{1,0} multiply(%one, %one)\n"
        "  ROOT %two = f32[4,8]{1,0} call(%half), to_apply=%reduced",
        REDUCED,
    )
    assert [row.executions for row in audit.collectives(text)] == [1, 1]
    with pytest.raises(AssertionError, match=r"the same bytes are reduced twice over dp"):
        audit.assert_one_reduction(text, axis_name="dp", mesh=mesh_of(dp=8))
    once = module("  ROOT %one = f32[4,8]{1,0} call(%x), to_apply=%reduced", REDUCED)
    audit.assert_one_reduction(once, axis_name="dp", mesh=mesh_of(dp=8))


def test_a_real_call_in_a_real_loop():
    # XLA inlines calls when it compiles; before that, jit inside jit is one.
    @jax.jit
    def inner(x):
        return jax.lax.psum(x, "dp") * 0.5

    def step(x):
        return jax.lax.scan(lambda c, _: (inner(c), None), inner(x), None, length=5)[0]

    mesh = mesh_of(dp=8)
    f = jax.shard_map(step, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)
    text = jax.jit(f).lower(shaped((64, D), mesh, "dp")).as_text("hlo")
    assert "call(" in text
    assert "num_partitions" not in text
    text = text.replace("HloModule jit_step,", "HloModule jit_step, num_partitions=8,", 1)
    assert [row.executions for row in audit.collectives(text, mesh=mesh)] == [1, 5]
    with pytest.raises(AssertionError, match=r"runs 5 times a call, in a loop"):
        audit.assert_one_reduction(text, axis_name="dp", mesh=mesh)


@pytest.mark.parametrize(
    "wrapping",
    [
        "  ROOT %f = f32[4,8]{1,0} fusion(%x), kind=kCustom, calls=%reduced",
        "  %s = ((f32[4,8]{1,0}), f32[4,8]{1,0}) async-start(%x), calls=%reduced\n"
        "  %u = ((f32[4,8]{1,0}), f32[4,8]{1,0}) async-update(%s)\n"
        "  ROOT %d = f32[4,8]{1,0} async-done(%u)",
        '  ROOT %c = f32[4,8]{1,0} custom-call(%x), custom_call_target="calls=%x, to_apply=%y", '
        "called_computations={%reduced}",
    ],
    ids=["fusion", "async", "custom-call"],
)
def test_collectives_are_found_inside(wrapping):
    text = module(wrapping, REDUCED)
    assert summary(audit.collectives(text)) == [("all-reduce", ("?",), "f32", ("f32[4,8]",), 1)]
    audit.assert_one_reduction(text, axis_name="dp", mesh=mesh_of(dp=8))


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%same, %reduced}",
        "true_computation=%reduced, false_computation=%same",
    ],
)
def test_both_notations_of_a_conditional(branches):
    text = module(
        f"  %i = s32[] constant(1)\n"
        f"  ROOT %c = f32[4,8]{{1,0}} conditional(%i, %x, %x), {branches}",
        REDUCED,
        ("same", "  ROOT %n = f32[4,8]{1,0} negate(%p)"),
    )
    assert [row.conditional for row in audit.collectives(text)] == [True]


@pytest.mark.parametrize(
    ("header", "attributes", "groups"),
    [
        # Replica ids, each partition by itself: device = replica * partitions + partition.
        ("replica_count=4, num_partitions=2", "replica_groups={{0,1},{2,3}}", (2, {"r"})),
        ("replica_count=4, num_partitions=2", "replica_groups={}", (4, {"r"})),
        # With a channel, all the partitions of those replicas.
        ("replica_count=4, num_partitions=2", "channel_id=1, replica_groups={{0},{1},{2},{3}}",
         (2, {"p"})),
        ("replica_count=4, num_partitions=2", "channel_id=1, replica_groups={}", (8, {"r", "p"})),
        # Flattened ids.
        ("replica_count=4, num_partitions=2",
         "channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, use_global_device_ids=true",
         (2, {"p"})),
        ("replica_count=8", "replica_groups={{0,2,4,6},{1,3,5,7}}", (4, {"r"})),
        # The mesh notation, whose value has a comma outside every bracket.
        ("replica_count=1, num_partitions=8",
         "channel_id=1, replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, "
         "use_global_device_ids=true", (2, {"p"})),
    ],
)  # fmt: skip
def test_replica_ids_partition_ids_and_flattened_ids(header, attributes, groups):
    text = module(
        f"  ROOT %ar = f32[4,8]{{1,0}} all-reduce(%x), {attributes}, to_apply=%sum",
        head=HEAD.replace("num_partitions=8", header),
    )
    mesh = AbstractMesh((4, 2), ("r", "p"))
    (row,) = audit.collectives(text, mesh=mesh)
    assert (row.group_size, set(row.axes)) == groups


def test_the_groups_of_an_exchange_with_a_channel_are_partitions():
    text = module(
        "  ROOT %a = f32[4,8]{1,0} all-to-all(%x), channel_id=1, replica_groups={{0,1,2,3},"
        "{4,5,6,7}}, dimensions={0}"
    )
    (row,) = audit.collectives(text, mesh=AbstractMesh((2, 4), ("r", "dp")))
    assert row.axes == ("dp",)


def test_placing_a_shard_among_zeros_makes_an_all_reduce_a_gather():
    # The TPU compiler writes small all-gathers so.
    def text(base, index):
        return module(
            "  %id = u32[] partition-id()\n"
            "  %one = s32[] constant(1)\n  %zero = s32[] constant(0)\n"
            "  %at = s32[] convert(%id)\n  %nought = f32[] constant(0)\n"
            "  %zeros = f32[32,8]{1,0} broadcast(%nought), dimensions={}\n"
            '  %like = f32[32,8]{1,0} custom-call(%x), custom_call_target="grown"\n'
            f"  %rs = f32[4,8]{{1,0}} all-reduce(%x), {REDUCE}\n"
            f"  %placed = f32[32,8]{{1,0}} dynamic-update-slice({base}, %rs, {index}, %zero)\n"
            f"  ROOT %ar = f32[32,8]{{1,0}} all-reduce(%placed), {REDUCE}"
        )

    mesh = mesh_of(dp=8)
    audit.assert_one_reduction(text("%zeros", "%at"), axis_name="dp", mesh=mesh)
    for base, index in [("%zeros", "%one"), ("%like", "%at")]:
        with pytest.raises(AssertionError, match="the same bytes are reduced twice over dp"):
            audit.assert_one_reduction(text(base, index), axis_name="dp", mesh=mesh)


@pytest.mark.parametrize(("count", "passes"), [(256, True), (257, False)], ids=["1 KB", "more"])
@pytest.mark.parametrize("form", ["tuple", "end to end"])
def test_a_kilobyte_of_scalars_may_ride_along(form, count, passes):
    scalars = [f"%s{i}" for i in range(count)]
    lines = [f'  {s} = f32[1]{{0}} custom-call(%x), custom_call_target="t"' for s in scalars]
    lines.append("  %flat = f32[32]{0} bitcast(%x)")
    inside, size = ", ".join(["%flat", *scalars]), 32 + count
    if form == "tuple":
        shapes = ", ".join(["f32[32]{0}", *["/*index=5*/f32[1]{0}"] * count])
        lines.append(f"  %ar = ({shapes}) all-reduce({inside}), {REDUCE}")
        lines.append("  %out = f32[32]{0} get-tuple-element(%ar), index=0")
    else:
        lines.append(f"  %all = f32[{size}]{{0}} concatenate({inside}), dimensions={{0}}")
        lines.append(f"  %start = f32[{size}]{{0}} all-reduce-start(%all), {REDUCE}")
        lines.append(f"  %done = f32[{size}]{{0}} all-reduce-done(%start)")
        lines.append("  %out = f32[32]{0} slice(%done), slice={[0:32]}")
    lines.append("  ROOT %back = f32[4,8]{1,0} bitcast(%out)")
    text, mesh = module("\n".join(lines)), mesh_of(dp=8)
    (row,) = audit.collectives(text, mesh=mesh)
    assert (row.bytes, len(row.shapes)) == (4 * size, 1 + count)
    if passes:
        audit.assert_one_reduction(text, axis_name="dp", mesh=mesh)
        return
    with pytest.raises(
        AssertionError, match=r"1,028 bytes of scalars are reduced over dp; required: at most 1,024"
    ):
        audit.assert_one_reduction(text, axis_name="dp", mesh=mesh)


@pytest.mark.parametrize("added", [True, False], ids=["added", "apart"])
def test_arrays_laid_end_to_end_are_followed_one_by_one(added):
    # The GPU compiler's way to combine reductions: here of two microbatches' gradients.
    last = "add(%c, %d)" if added else "multiply(%c, %d)"
    text = module(
        "  %a = f32[32]{0} bitcast(%x)\n"
        '  %b = f32[32]{0} custom-call(%x), custom_call_target="b"\n'
        "  %ab = f32[64]{0} concatenate(%a, %b), dimensions={0}\n"
        f"  %ar = f32[64]{{0}} all-reduce(%ab), {REDUCE}\n"
        "  %c = f32[32]{0} slice(%ar), slice={[0:32]}\n"
        "  %d = f32[32]{0} slice(%ar), slice={[32:64]}\n"
        f"  %e = f32[32]{{0}} {last}\n"
        "  ROOT %out = f32[4,8]{1,0} bitcast(%e)"
    )
    assert audit.collectives(text)[0].shapes == ("f32[32]", "f32[32]")
    if not added:
        audit.assert_one_reduction(text, axis_name="dp", mesh=mesh_of(dp=8))
        return
    with pytest.raises(AssertionError, match=r"result 0 of all-reduce ar .* and result 1 of all-r"):
        audit.assert_one_reduction(text, axis_name="dp", mesh=mesh_of(dp=8))


def test_scalars_laid_end_to_end_are_still_scalars():
    text = module(
        '  %a = f32[1]{0} custom-call(%x), custom_call_target="a"\n'
        '  %b = f32[1]{0} custom-call(%x), custom_call_target="b"\n'
        "  %ab = f32[2]{0} concatenate(%a, %b), dimensions={0}\n"
        f"  %ar = f32[2]{{0}} all-reduce(%ab), {REDUCE}\n"
        "  ROOT %out = f32[4,8]{1,0} negate(%x)"
    )
    with pytest.raises(AssertionError, match=r"none sums .* \(beside 8 bytes of scalars\)"):
        audit.assert_one_reduction(text, axis_name="dp", mesh=mesh_of(dp=8))


@pytest.mark.parametrize(
    ("shape", "size"),
    [("f32[4,8]{1,0:T(8,128)S(1)}", 128), ("bf16[4,8]{1,0:T(8,128)(2,1)}", 64), ("s4[3]{0}", 2),
     ("pred[5]", 5), ("c64[2]{0}", 16), ("f8e4m3fn[7]{0}", 7), ("u32[]{:S(2)}", 4),
     ("f32[<=4,8]{1,0}", 128)],
)  # fmt: skip
def test_bytes_by_element_type(shape, size):
    text = module(
        f'  %y = {shape} custom-call(%x), custom_call_target="t"\n'
        f"  %ar = {shape} all-reduce(%y), {REDUCE}\n"
        "  ROOT %out = f32[4,8]{1,0} negate(%x)"
    )
    (row,) = audit.collectives(text)
    assert row.bytes == size


SEND = """  %token = token[] after-all()
  %send = (f32[4,8]{1,0}, u32[], token[]) send(%x, %token), channel_id=2, FRONTEND
  %sent = token[] send-done(%send), channel_id=2
  ROOT %out = f32[4,8]{1,0} negate(%x)"""


@pytest.mark.parametrize(
    ("attributes", "axes"),
    [
        ('is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="tf"}', []),
        ('frontend_attributes={_xla_send_recv_source_target_pairs="{{0,2},{2,4}}"}', [("dp",)]),
        ("frontend_attributes={_xla_send_recv_source_target_pairs={{0,1}},x={{0,2}}}", [("mp",)]),
    ],
    ids=["to the host", "quoted pairs", "pairs"],
)
def test_sends_to_the_host_are_no_collectives_and_those_to_devices_are(attributes, axes):
    text = module(SEND.replace("FRONTEND", attributes))
    report = audit.collectives(text, mesh=AbstractMesh((4, 2), ("dp", "mp")))
    assert [(row.kind, row.axes, row.bytes) for row in report] == [("send", a, 128) for a in axes]


def test_a_transfer_between_slices_that_cannot_be_read_is_an_error():
    attributes = 'frontend_attributes={_xla_megascale_target="somewhere"}'
    with pytest.raises(ValueError, match=r"cannot read between which TPU slices send sends: .*so"):
        audit.collectives(module(SEND.replace("FRONTEND", attributes)))


def test_a_ragged_exchange_counts_its_data_and_not_its_offsets():
    offsets = ", ".join(["%o"] * 4)
    text = module(
        '  %o = s32[8]{0} custom-call(%x), custom_call_target="offsets"\n'
        f"  ROOT %r = f32[4,8]{{1,0}} ragged-all-to-all(%x, %x, {offsets}), channel_id=1, "
        "replica_groups={{0,1,2,3,4,5,6,7}}"
    )
    (row,) = audit.collectives(text, mesh=mesh_of(dp=8))
    assert (row.kind, row.axes, row.bytes) == ("ragged-all-to-all", ("dp",), 128)
