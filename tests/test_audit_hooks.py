"""The audit of compressed means made by hand: one reduction each, and too many are caught."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import pytest
from audit_fixtures.programs import GRAD, D, compiled, mesh_of, program, shaped
from audit_fixtures.quantised import (
    by_leaf,
    fp16_mean,
    fused,
    gram_schmidt,
    hsdp_mean,
    int8_mean,
    power_sgd,
    rows_added,
)
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from gradaccum import audit

HSDP = ("replica", "fsdp")
PASSES = None
TWICE = r"the same bytes are reduced twice over "

zeros = functools.partial(jax.tree.map, jnp.zeros_like)
add = functools.partial(jax.tree.map, jnp.add)
int8 = fused(int8_mean)


def psum(tree, axis="dp"):
    return jax.lax.psum(tree, axis)


def pmean(tree):
    return jax.lax.pmean(tree, "dp")


def low_rank(tree, **options):
    return power_sgd(tree, zeros(tree), **options)


def matrices_in_int8(tree):
    """As hooks do: what is small goes along in full, and is not exchanged."""
    small = iter(pmean([g for g in jax.tree.leaves(tree) if g.ndim < 2]))
    return jax.tree.map(lambda g: next(small) if g.ndim < 2 else int8_mean(g), tree)


def in_a_loop(mean):
    def step(params, x):
        def body(total, rows):
            return add(total, mean(GRAD(params, rows))), None

        return jax.lax.scan(body, zeros(params), x.reshape(4, -1, D))[0]

    return step


def one_by_one(mean):
    def step(params, x):
        return functools.reduce(add, [mean(GRAD(params, rows)) for rows in x.reshape(4, -1, D)])

    return step


def low_rank_in_a_loop(params, x):
    """Each microbatch's error is fed back to the next."""

    def body(carry, rows):
        mean, errors = power_sgd(GRAD(params, rows), carry[1])
        return (add(carry[0], mean), errors), None

    return jax.lax.scan(body, (zeros(params), zeros(params)), x.reshape(4, -1, D))[0]


def once(mean):
    return lambda params, x: mean(GRAD(params, x))


def in_a_branch(step):
    """The same where the first bias is positive; else a tree of zeros, as a window's middle."""

    def conditional(params, x):
        shapes = jax.eval_shape(step, params, x)

        def skipped(params, x):
            del params, x
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        return jax.lax.cond(params[0][1][0] > 0, step, skipped, params, x)

    return conditional


CASES = {
    "int8, one exchange": (once(int8), PASSES),
    "int8 by leaf": (once(by_leaf(int8_mean)), PASSES),
    "int8, added row by row": (once(fused(functools.partial(int8_mean, total=rows_added))), PASSES),
    "int8 of the matrices": (once(matrices_in_int8), PASSES),
    "int8 in a loop": (in_a_loop(int8), r"runs 4 times a call, in a loop"),
    "int8 one by one": (one_by_one(int8), r"two reductions over dp are added to each other"),
    "int8 of int8": (once(lambda g: int8(int8(g))), TWICE + r"dp: operand 0 of all-to-all"),
    "int8 of a mean": (once(lambda g: int8(pmean(g))), TWICE + r"dp: operand 0 of all-to-all"),
    "a mean of int8": (once(lambda g: pmean(int8(g))), TWICE + r"dp: operand \d of all-reduce"),
    "int8 beside a mean": (once(lambda g: (int8(g), pmean(g))), r"exchanges what was computed of"),
    "low rank": (once(low_rank), PASSES),
    "low rank, by hand": (once(functools.partial(low_rank, orthogonalise=gram_schmidt)), PASSES),
    "rank 1": (once(functools.partial(low_rank, rank=1)), PASSES),
    "low rank in a loop": (low_rank_in_a_loop, r"runs 4 times a call, in a loop"),
    "fp16": (once(fp16_mean), PASSES),
    "fp16 of fp16": (once(lambda g: fp16_mean(fp16_mean(g))), TWICE + "dp"),
}


def check(made, reason, axis_name="dp", *, conditional=False):
    def asserted():
        audit.assert_one_reduction(made, axis_name=axis_name, conditional=conditional)

    if reason is PASSES:
        asserted()
    else:
        with pytest.raises(AssertionError, match=reason):
            asserted()


@pytest.mark.parametrize("conditional", [False, True], ids=["always", "in a branch"])
@pytest.mark.parametrize(("step", "reason"), CASES.values(), ids=CASES)
def test_compressed_means(step, reason, conditional):
    made = program(in_a_branch(step) if conditional else step, mesh_of(dp=8))
    check(made, reason, conditional=conditional)
    if conditional:
        with pytest.raises(AssertionError):
            audit.assert_one_reduction(made, axis_name="dp")


STARTS = {
    "int8": (int8, PASSES, lambda tree: tree),
    "low rank": (lambda g: low_rank(g)[0], PASSES, lambda tree: tree),
    "int8, then a mean": (int8, TWICE + "dp", pmean),
}


@pytest.mark.parametrize(("mean", "reason", "then"), STARTS.values(), ids=STARTS)
def test_a_plain_mean_until_the_start_step(mean, reason, then):
    mesh = mesh_of(dp=8)

    def step(count, params, x):
        return then(jax.lax.cond(count < 10, pmean, mean, GRAD(params, x)))

    f = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("dp")), out_specs=P(), check_vma=False)
    params = [(shaped((D, D), mesh), shaped((D,), mesh)) for _ in range(2)]
    made = compiled(f, shaped((), mesh, dtype=jnp.int32), params, shaped((64, D), mesh, "dp"))
    check(made, reason, conditional=True)


TWO_AXES = {
    "HSDP": (hsdp_mean, P("fsdp"), PASSES),
    "both axes at once": (functools.partial(int8, axis=HSDP), P(), PASSES),
    "again over one": (
        lambda g: psum(hsdp_mean(g), "replica"),
        P("fsdp"),
        TWICE + "replica: operand",
    ),
    "never over the slow one": (
        lambda g: jax.tree.map(lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True), g),
        P("fsdp"),
        r"no gradient is reduced over replica=2",
    ),
    "one leaf not over the slow one": (
        lambda g: (hsdp_mean(g[0]), psum(g[1], "fsdp")),
        (P("fsdp"), P()),
        r"is not reduced over all of replica=2",
    ),
    "never over the fast one": (
        functools.partial(int8, axis="replica"),
        P(),
        r"no gradient is reduced over fsdp=4",
    ),
}


@pytest.mark.parametrize(("mean", "out", "reason"), TWO_AXES.values(), ids=TWO_AXES)
def test_two_data_axes(mean, out, reason):
    check(program(once(mean), mesh_of(replica=2, fsdp=4), HSDP, out=out), reason, HSDP)


def test_what_is_sent_in_int8_is_little_more_than_a_quarter():
    mesh = mesh_of(dp=8)
    plain, small = (audit.collectives(program(once(f), mesh)) for f in (psum, int8))
    assert {row.dtype for row in small} == {"s8"}
    assert sorted(row.kind for row in small) == ["all-gather", "all-to-all"]
    # `bytes` counts the exchange and the gather each, the all-reduce that they stand for once.
    ratio = small.totals["dp"].wire_bytes / plain.totals["dp"].wire_bytes
    padded = 768 / (2 * (D * D + D))  # to whole blocks of 32 for each device
    assert ratio == pytest.approx(padded * (32 + 4) / 32 / 4, rel=1e-3)
    assert small.totals["dp"].bytes / plain.totals["dp"].bytes == pytest.approx(2 * ratio, rel=1e-3)


def test_a_tpu_gathers_int8_by_an_all_reduce_of_words():
    # "int8, one exchange" by jax 0.10.2 and libtpu 0.0.52 for v5e:2x4, without layouts.
    text = (pathlib.Path(__file__).parent / "audit_fixtures/tpu_v5e_int8.txt").read_text()
    mesh = AbstractMesh((8,), ("dp",))
    rows = audit.collectives(text, mesh=mesh)
    assert [(row.kind, row.dtype, row.wire_bytes) for row in rows] == [
        ("all-to-all", "s8", 864 * 7 // 8),
        ("all-reduce", "u32", 2 * 1024 * 7 // 8),  # and twice what a gather sends
    ]
    audit.assert_one_reduction(text, axis_name="dp", mesh=mesh)
    # Larger ones are moved by reductions of a dimension of size 1.
    reduced = text.replace(
        "copy(%all_to_all.9)",
        "reduce(%all_to_all.9, %constant.42), dimensions={}, to_apply=%add.1.clone",
    )
    assert reduced != text
    audit.assert_one_reduction(reduced, axis_name="dp", mesh=mesh)
    moved = text.replace("dynamic-update-slice(%broadcast.103", "add(%broadcast.103")
    assert moved != text
    with pytest.raises(AssertionError, match=r"all-reduce.* carries the result of all-to-all"):
        audit.assert_one_reduction(moved, axis_name="dp", mesh=mesh)


@pytest.mark.parametrize(
    ("kind", "group_size", "size", "sent"),
    [
        ("all-reduce", 8, 4, 7),
        ("all-reduce", 3, 4, 6),  # 5.33
        ("all-gather", 3, 4, 3),  # 2.67
        ("all-reduce", 2, 4, 4),
        ("ragged-all-to-all", 4, 128, 96),
        ("collective-broadcast", 4, 128, 128),
        ("send", 4, 128, 128),
        ("all-reduce", 7, 2**60 + 1, -(-12 * (2**60 + 1) // 7)),  # beyond a float
    ],
)
def test_bytes_sent_are_whole_and_exact(kind, group_size, size, sent):
    row = audit.Collective(kind, ("dp",), "s8", size, 1, False, "", (), (), group_size, "x")
    assert row.wire_bytes == sent
