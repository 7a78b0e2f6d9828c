"""The bench: its table, its JSON, the agreement it demands, and the real command."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from bench_runs import TINY, parse

from absl_apps import bench, bench_calls, bench_flags, bench_measure, bench_steps, meshes

TREE = 2 * 32 * 32 * 4  # bytes of a gradient tree
ALL = f"--contenders={','.join(bench_steps.CONTENDERS)}"


def table(text):
    """The cells of the Markdown table in `text`, by name of the step."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    header, _, *rows = rows
    assert all(len(row) == len(header) for row in rows)
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


############################################ A run ###############################################


def test_run(capsys, tmp_path):
    path = tmp_path / "bench.json"
    bench.bench(parse(*TINY, ALL, f"--json={path}"))
    printed = capsys.readouterr().out
    cells, results = table(printed), json.loads(path.read_text())
    rows = results["contenders"]
    assert list(cells) == list(rows) == list(bench_steps.CONTENDERS)
    assert results["gradient_bytes"] == TREE

    assert re.search(r"values agree: loss within \S+, update within \S+ of gradaccum's", printed)
    assert printed.index("values agree") < printed.index("| step")
    for name, row in rows.items():
        if name != "limit":  # which takes no mean
            assert max(results["differences"][name].values()) <= results["tolerance"] == 1e-5
        assert len(row["seconds"]) == 2
        assert 0 < row["min_seconds"] <= row["median_seconds"] <= row["max_seconds"]
        assert cells[name]["ratio"] == f"{row['ratio']:.2f}"
        assert cells[name]["bytes a step"] == f"{row['all_reduce_bytes']:,}"
        assert cells[name]["all-reduces a step"] == f"{row['all_reduces']:,}"
        assert row["temp_gradient_trees"] == row["temp_bytes"] / TREE
        assert cells[name]["peak memory, bytes"] == f"{row['peak_bytes']:,}"
        assert row["peak_bytes"] > row["temp_bytes"]
        assert row["bytes_across_slices"] is None  # there is one slice
    assert rows["gradaccum"]["ratio"] == 1

    # One reduction of one tree and the loss, against one for every microbatch and layer.
    for name in "shard_map", "gradaccum", "gradaccum_by_value":
        assert (rows[name]["all_reduces"], rows[name]["calls"]) == (1, 1)
        assert rows[name]["all_reduce_bytes"] == TREE + 4
    for name in "zero2", "fsdp":  # no gradient is reduced whole; what is split is gathered once
        assert (rows[name]["all_reduces"], rows[name]["all_reduce_bytes"]) == (1, 4)
        others = rows[name]["other_collective_bytes"]
        assert others == {"reduce-scatter": TREE, "all-gather": TREE}
    assert "one cross-device mean, checked" in printed
    # Of the gradients alone: arguments, accumulator and result, whole or the eighth that is held.
    peaks = {name: row["gradient_peak_bytes"] for name, row in rows.items()}
    assert peaks["multisteps"] is None
    assert peaks["gradaccum"] > peaks["zero2"] > 2 * TREE
    assert results["differences"]["limit"]["update"] > 1e-2
    assert (rows["limit"]["all_reduces"], rows["limit"]["all_reduce_bytes"]) == (1, 4)
    # JAX's own recipe reduces gradients once too, and the loss in each of 4 microbatches.
    assert rows["reduced"]["all_reduces"] == 1 + 4
    assert rows["reduced"]["all_reduce_bytes"] == TREE + 4 * 4
    assert rows["reduced"]["other_collective_bytes"] == {}
    for name in "naive", "multisteps", "microbatching":  # 4 microbatches of 2 layers and a loss
        assert rows[name]["all_reduces"] == 4 * (2 + 1)
        assert rows[name]["all_reduce_bytes"] == 4 * (TREE + 4)
    assert rows["multisteps"]["calls"] == 4
    assert rows["multisteps"]["state_bytes"] >= TREE
    assert cells["multisteps"]["temporary memory, gradient trees"].endswith(" + 1.00 state")

    sizes = results["program_instructions"]
    assert list(sizes) == ["2", "1024"]
    assert sizes["2"] == sizes["1024"] > 10
    assert printed.rstrip().endswith(": the same")
    assert results["flags"]["grad_acc_steps"] == 4
    assert results["versions"]["jax"] == jax.__version__
    assert results["devices"] == {
        "platform": "cpu",
        "kind": "cpu",
        "count": 8,
        "ran": True,
    }


def test_calls(capsys):
    names = ",".join(bench_calls.CONTENDERS)
    results = bench.bench(parse(*TINY, "--problem=calls", "--donate", f"--contenders={names}"))
    printed = capsys.readouterr().out
    cells, rows = table(printed), results["contenders"]
    tree, leaves = 2 * 2 * 32 * 128 * 4, 4  # two MLPs of two matrices
    assert results["gradient_bytes"] == tree
    assert printed.startswith("4 matrices of 32 x 128, adamw, 4 calls of 16 rows, float32: a grad")
    assert "gradaccum: one cross-device mean in a branch (counts once), checked" in printed

    # In each of 4 calls the gradients and the loss; or once the gradients and each one's weight.
    for name in "optax", "plain":
        assert rows[name]["all_reduces"] == 4
        assert rows[name]["all_reduce_bytes"] == 4 * (tree + 4)
    assert (rows["gradaccum"]["all_reduces"], rows["gradaccum"]["calls"]) == (1, 4)
    assert rows["gradaccum"]["all_reduce_bytes"] == tree + 4 * leaves
    assert cells["gradaccum"]["all-reduces a window"] == "1"
    assert cells["optax"]["bytes a window"] == f"{4 * (tree + 4):,}"
    for name, row in rows.items():
        assert max(results["differences"][name].values()) <= 1e-5
        assert len(row["seconds"]) == 2
        assert row["other_collective_bytes"] == {}
        # Adam's two moments and the accumulator: a device holds one row of it.
        assert 3 * tree <= row["state_bytes"] < 3 * tree + 100
        assert cells[name]["temporary memory, gradient trees"].endswith(" + 3.00 state")
    assert printed.rstrip().endswith(": the same")


def test_the_default_contenders_are_those_of_the_problem(capsys):
    results = bench.bench(parse(*TINY, "--problem=calls", "--noprogram_size"))
    assert list(results["contenders"]) == list(table(capsys.readouterr().out))
    assert list(results["contenders"]) == ["optax", "gradaccum"]


def test_bfloat16_agrees_within_its_own_tolerance(capsys):
    results = bench.bench(
        parse(*TINY, "--dtype=bfloat16", "--noprogram_size", "--contenders=naive,gradaccum")
    )
    assert results["gradient_bytes"] == TREE // 2
    assert results["tolerance"] == 5e-2
    assert 0 < results["differences"]["naive"]["update"] < 5e-2
    assert "(at most 0.05)" in capsys.readouterr().out


def test_over_two_slices_a_device_sends_its_part_of_the_gradients(capsys):
    names = "shard_map,gradaccum,zero2,fsdp"
    results = bench.bench(
        parse(*TINY, "--noprogram_size", "--num_slices=2", "--dp=4", f"--contenders={names}")
    )
    printed = capsys.readouterr().out
    assert "8 devices, cpu" in printed
    assert "gradaccum, zero2, fsdp: one cross-device mean, checked" in printed
    crossing = {name: row["bytes_across_slices"] for name, row in results["contenders"].items()}
    # On one mesh of CPUs XLA reduces whole trees; what is split crosses in parts, with the loss.
    assert crossing == dict.fromkeys(("shard_map", "gradaccum"), TREE + 4) | dict.fromkeys(
        ("zero2", "fsdp"), TREE // 4 + 4
    )
    assert f"fsdp a step between slices: {TREE // 4 + 4:,} bytes a device" in printed
    assert max(d["update"] for d in results["differences"].values()) <= 1e-5


def test_a_step_that_loses_a_microbatch_is_refused_before_any_time(capsys, monkeypatch):
    def lossy(problem):
        step = bench_steps.shard_map(problem)

        def run(program, params, batch):
            return program(params, batch.at[:1].set(batch[1]))

        return step._replace(run=run)

    monkeypatch.setitem(bench_flags.CONTENDERS["steps"], "shard_map", lossy)
    with pytest.raises(ArithmeticError, match=r"values differ .* more than 1e-05 .*'shard_map'"):
        bench.bench(parse(*TINY, "--contenders=shard_map,gradaccum"))
    assert "| step" not in capsys.readouterr().out


def test_a_nan_is_refused():
    before = jnp.zeros((2, 2))
    ours, theirs = (before + 1, jnp.ones(())), (before + jnp.nan, jnp.ones(()))
    with pytest.raises(ArithmeticError, match="'update': nan"):
        bench_measure.compare({"gradaccum": ours, "shard_map": theirs}, before, "float32")


def test_every_array_of_the_parameters_is_compared():
    before, loss = [jnp.zeros((2, 2)), jnp.zeros((3,))], jnp.ones(())
    ours, theirs = ([jnp.ones((2, 2)), jnp.full((3,), x)] for x in (1.0, 2.0))
    values = {"gradaccum": (ours, loss), "optax": (theirs, loss)}
    with pytest.raises(ArithmeticError, match=r"'optax': .*'update': 0\.65"):
        bench_measure.compare(values, before, "float32")


def test_what_is_only_compiled_is_not_measured(capsys, monkeypatch):
    here = meshes.make({"dp": 8}, "--dp=8")
    monkeypatch.setattr(bench.aot, "tpu_mesh", lambda *asked, num_slices: here)
    results = bench.bench(parse(*TINY, "--topology=v3:2x2", "--noprogram_size"))
    row = table(capsys.readouterr().out)["naive"]
    assert row["median, s"] == row["min to max, s"] == row["ratio"] == "not measured"
    assert row["all-reduces a step"] == "12"
    assert results["contenders"]["naive"]["median_seconds"] is None
    assert results["differences"] is None
    assert results["devices"]["ran"] is False


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize(
    ("problem", "name"),
    [(problem, name) for problem, names in bench_flags.CONTENDERS.items() for name in names],
)
def test_donate_gives_parameters_and_state_to_every_step(problem, name, donate):
    mesh = meshes.make({"dp": 8}, "--dp=8")
    sizes = bench_flags.PROBLEMS[problem](mesh, 2, 16, 32, 2, jnp.dtype("float32"), donate)
    step = bench_flags.CONTENDERS[problem][name](sizes)
    (*held, batch), _ = step.jitted.lower(*step.shapes).args_info
    assert {x.donated for x in jax.tree.leaves(held)} == {donate}
    assert not batch.donated


def test_donated_steps_are_given_copies():
    results = bench.bench(parse(*TINY, "--donate", "--noprogram_size"))
    assert all(len(row["seconds"]) == 2 for row in results["contenders"].values())


######################################## The real command ########################################


def test_the_command():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, "-m", "absl_apps.bench", *TINY, "--noprogram_size"]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "2 layers of 32, batch 64 in 4 microbatches, float32" in result.stdout
    assert "8 devices, cpu; jax " in result.stdout
    assert list(table(result.stdout)) == list(bench_steps.DEFAULT)
