"""Trip counts read from a loop's condition, against the loop run by Python."""

import jax
import pytest
from audit_fixtures.programs import mesh_of, shaped
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from gradaccum import audit

TEST = {
    "LT": int.__lt__,
    "LE": int.__le__,
    "GT": int.__gt__,
    "GE": int.__ge__,
    "NE": int.__ne__,
    "EQ": int.__eq__,
}

LOOP = """HloModule loop, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %r = f32[] add(%a, %b)
}}

%test (x: s32[], y: s32[]) -> pred[] {{
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  ROOT %compare = pred[]{{:T(1024)}} compare(%x, %y), direction={direction}
}}

%test_next (x: s32[], y: s32[]) -> pred[] {{
  %x = s32[] parameter(0)
  %y = s32[] parameter(1)
  %one = s32[] constant(1)
  %next = s32[] add(%x, %one)
  ROOT %compare = pred[] compare(%next, %y), direction={direction}
}}

%body (p: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %p = (s32[]{{:T(256)}}, f32[4]{{0}}, s32[]{{:T(256)}}) parameter(0)
  %i = s32[]{{:T(256)}} get-tuple-element(%p), index=0
  %v = f32[4]{{0}} get-tuple-element(%p), index=1
  %n = s32[]{{:T(256)}} get-tuple-element(%p), index=2
  %step = s32[] constant({step})
  %next = s32[]{{:T(256)}} add(%i, %step)
  %all-reduce = f32[4]{{0}} all-reduce(%v), replica_groups=[1,8]<=[8], {how}, to_apply=%sum
  ROOT %t = (s32[], f32[4]{{0}}, s32[]) tuple(%next, %all-reduce, {bound_out})
}}

%condition (p: (s32[], f32[4], s32[])) -> pred[] {{
  %p = (s32[]{{:T(256)}}, f32[4]{{0}}, s32[]{{:T(256)}}) parameter(0)
  %i = s32[]{{:T(256)}} get-tuple-element(%p), index=0
  %n = s32[]{{:T(256)}} get-tuple-element(%p), index=2
  ROOT %done = pred[] {condition}
}}

ENTRY %main (x: f32[4], k: s32[]) -> f32[4] {{
  %x = f32[4]{{0}} parameter(0)
  %k = s32[] parameter(1)
  %start = s32[] constant({start})
  %bound = s32[] constant({bound})
  %copy = s32[] copy(%bound)
  %t = (s32[], f32[4]{{0}}, s32[]) tuple(%start, %x, {bound_in})
  %while = (s32[], f32[4]{{0}}, s32[]) while(%t), condition=%condition, body=%body{annotation}
  ROOT %out = f32[4]{{0}} get-tuple-element(%while), index=1
}}
"""
DEFAULTS = {
    "direction": "LT",
    "step": 1,
    "start": 0,
    "bound": 5,
    "condition": "fusion(%i, %n), kind=kLoop, calls=%test",
    "bound_in": "%copy",
    "bound_out": "%n",
    "annotation": "",
    "how": "channel_id=1, use_global_device_ids=true",
}


def executions(**changes):
    (row,) = audit.collectives(LOOP.format(**{**DEFAULTS, **changes}))
    return row.executions


@given(
    start=st.integers(-20, 20),
    step=st.integers(-5, 5),
    bound=st.integers(-20, 20),
    direction=st.sampled_from(sorted(TEST)),
    mirrored=st.booleans(),
)
def test_the_count_is_that_of_the_loop_run(start, step, bound, direction, mirrored):
    i, count = start, 0
    while TEST[direction](i, bound) and count <= 100:
        i, count = i + step, count + 1
    want = count if count <= 100 else None  # it never ends
    order = "%i, %n"
    if mirrored:
        order = "%n, %i"
        direction = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}.get(direction, direction)
    got = executions(
        start=start,
        step=step,
        bound=bound,
        direction=direction,
        condition=f"fusion({order}), kind=kLoop, calls=%test",
    )
    assert got == want


def test_a_comparison_in_the_condition_itself():
    assert executions(condition="compare(%i, %n), direction=LT") == 5
    assert executions(condition="compare(%i, %n), direction=LE") == 6


def test_a_comparison_of_the_next_value():
    assert executions(condition="fusion(%i, %n), kind=kLoop, calls=%test_next") == 4


def test_an_annotation_wins():
    annotation = ', backend_config={"known_trip_count":{"n":"77"},"other":{"n":"5"}}'
    assert executions(annotation=annotation) == 77
    assert executions(annotation=', backend_config={"known_init_step":{"init":"0"}}') == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"bound_in": "%k"},  # a bound that is an argument
        {"bound_out": "%next"},  # a bound that changes
        {"condition": 'custom-call(%i), custom_call_target="x"'},
    ],
    ids=["argument", "changing", "opaque"],
)
def test_what_the_text_does_not_tell_is_unknown(changes):
    assert executions(**changes) is None
    text = LOOP.format(**{**DEFAULTS, **changes})
    with pytest.raises(AssertionError, match=r"runs an unknown number of times a call \(\?\)"):
        audit.assert_one_reduction(text, axis_name="dp", mesh=mesh_of(dp=8))


def test_a_loop_that_never_runs_reduces_nothing():
    text = LOOP.format(**{**DEFAULTS, "bound": 0})
    assert audit.collectives(text)[0].executions == 0
    with pytest.raises(AssertionError, match=r"no gradient is reduced over dp=8: of 1 operations"):
        audit.assert_one_reduction(text, axis_name="dp", mesh=mesh_of(dp=8))
    text = LOOP.format(**{**DEFAULTS, "bound": 1})
    audit.assert_one_reduction(text, axis_name="dp", mesh=mesh_of(dp=8))


@pytest.mark.parametrize(("triangular", "want"), [(False, 3 * 5), (True, None)])
def test_an_inner_loop_that_starts_at_the_outer_counter_has_no_one_count(triangular, want):
    mesh = mesh_of(dp=8)

    def step(x):
        def outer(i, c):
            return jax.lax.fori_loop(i if triangular else 0, 5, inner, c)

        def inner(_, c):
            return jax.lax.psum(c, "dp") * 0.5

        return jax.lax.fori_loop(0, 3, outer, x)

    f = jax.shard_map(step, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_vma=False)
    # Before XLA compiles it, no trip count is annotated, as on TPU.
    text = jax.jit(f).lower(shaped((8, 4), mesh, "dp")).as_text("hlo")
    text = text.replace("HloModule jit_step,", "HloModule jit_step, num_partitions=8,", 1)
    (row,) = audit.collectives(text, mesh=mesh)
    assert row.executions == want
    assert row.loops == (3, None if triangular else 5)
    assert row.times == ("3 x ? = ?" if triangular else "3 x 5 = 15")
