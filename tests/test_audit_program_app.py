"""The program absl_apps.audit: its tables, its JSON, its counts, and the real command."""

import json
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from audit_app import EXAMPLE, parse, table, write

from absl_apps import audit, audit_cost, meshes

SEED = "--d_model=32", "--n_layer=2", "--grad_acc_steps=4"
TREE = 2 * 32 * 32 * 4  # bytes of a gradient tree
TRAIN = (
    "--program=train",
    "--d_model=16",
    "--n_layer=2",
    "--n_head=2",
    "--seq_len=8",
    "--compute_dtype=float32",
)
NAMES = ["naive", "optax.MultiSteps", "gradaccum"]


############################################ The seed ############################################


def test_the_seed_in_three_forms(capsys, tmp_path):
    path = tmp_path / "audit.json"
    assert not audit.run(parse(*SEED, "--check", f"--json={path}"))["failed"]
    printed = capsys.readouterr().out
    cells, results = table(printed), json.loads(path.read_text())
    programs = results["programs"]
    assert list(programs) == NAMES

    # 4 microbatches of 2 layers and a loss; or one tree with the loss.
    reduced = [
        sum(
            program["calls"] * row["executions"] * row["bytes"]
            for row in program["collectives_of_a_call"]
            if row["kind"] == "all-reduce"
        )
        for program in programs.values()
    ]
    assert reduced == [4 * (TREE + 4), 4 * (TREE + 4), TREE + 4]
    shown = [cells["bytes over dp"][name] for name in NAMES]
    assert shown[1:] == [f"{size:,}" for size in reduced[1:]]
    assert shown[0] == f"{reduced[0] + 1024:,}"  # microbatches of a batch that lies split
    assert list(cells["one cross-device mean"].values()) == ["no", "no", "yes"]
    assert list(cells["calls of the program"].values()) == ["1", "4", "1"]
    assert cells["collectives"]["optax.MultiSteps"] == "12"
    # Forward, and backward twice: 32 rows over 8 devices, 2 layers.
    assert set(cells["FLOPs, of matrix products"].values()) == {f"{6 * 4 * 32 * 32 * 2:,}"}
    assert set(cells["XLA's seconds *"].values()) == {"not given"}

    for name, program in programs.items():
        assert cells["peak memory, bytes"][name] == f"{program['peak_bytes']:,}"
        assert program["peak_bytes"] > program["temp_bytes"] >= 0
        assert cells["program size, instructions"][name] == f"{program['instructions']:,}"
        assert program["compile_seconds"] > 0
        # Of one call, and once around each loop: fewer than there are.
        assert 0 < program["compiler"]["flops"] < program["flops"]
        rows, calls = program["collectives_of_a_call"], program["calls"]
        assert (
            sum(calls * row["executions"] * row["bytes"] for row in rows)
            == (program["bytes"]["dp"])
        )
        assert program["totals_of_a_call"]["dp"]["bytes"] * calls == program["bytes"]["dp"]
    assert programs["gradaccum"]["refusal"] is None
    assert "runs 4 x 2 = 8 times a call" in programs["naive"]["refusal"]
    assert "naive: not one cross-device mean: all-reduce" in printed
    assert "optax.MultiSteps: each of 4 calls a step of jit_call" in printed
    assert printed.rstrip().endswith("gradaccum: one cross-device mean over dp")
    assert results["mesh"] == {"dp": 8}
    assert results["flags"]["d_model"] == 32
    assert results["versions"]["jax"] == jax.__version__


def test_one_mean_in_each_of_several_calls_is_not_one(capsys):
    """With one layer, each call of optax.MultiSteps by itself passes."""
    results = audit.run(parse("--d_model=32", "--n_layer=1", "--grad_acc_steps=4"))
    refusal = results["programs"]["optax.MultiSteps"]["refusal"]
    assert refusal == "4 means a step: one in each call of a microbatch"
    assert table(capsys.readouterr().out)["one cross-device mean"]["optax.MultiSteps"] == "no"


def test_the_seed_on_a_tpu(capsys):
    results = audit.run(parse(*SEED, "--topology=v5e:2x4"))
    printed = capsys.readouterr().out
    cells = table(printed)
    assert printed.startswith("8 devices, TPU v5 lite with 16,911,433,728 bytes for programs, ")
    assert "--mesh=dp=8, compiled for only; jax " in printed
    part = results["programs"]["naive"]["peak_bytes"] / 16_911_433_728
    assert cells["peak memory, of a device's"]["naive"] == f"{part:.1%}"
    assert list(cells["one cross-device mean"].values()) == ["no", "no", "yes"]
    assert all(
        program["compiler"]["optimal_seconds"] > 0 for program in results["programs"].values()
    )
    assert cells["bytes over dp"]["gradaccum"] == f"{TREE + 4:,}"


def test_the_seed_on_gpus_of_two_hosts(capsys):
    results = audit.run(parse(*SEED, "--gpu=H100", "--hosts=2"))
    cells = table(capsys.readouterr().out)
    assert results["mesh"] == {"replica": 2, "dp": 8}
    assert cells["bytes over replica"]["gradaccum"] == f"{TREE + 4:,}"
    assert list(cells["one cross-device mean"].values()) == ["no", "no", "yes"]
    assert set(cells["XLA's FLOPs *"].values()) == {"not given"}
    assert set(cells["FLOPs, of matrix products"].values()) == {f"{6 * 4 * 32 * 32 * 2:,}"}


def test_what_does_not_fit_is_said_in_its_column(capsys):
    """Parameters of 7.5 GB on a chip of 15.48 GiB: there is room for one accumulator."""
    results = audit.run(parse("--topology=v3:2x2", "--d_model=8192", "--n_layer=28"))
    printed = capsys.readouterr().out
    cells = table(printed)
    assert list(cells["one cross-device mean"].values()) == ["does not fit", "does not fit", "yes"]
    assert results["programs"]["naive"] == {"none": "does not fit"}
    assert re.search(r"naive: does not fit: RESOURCE_EXHAUSTED: .* available HBM", printed)


####################################### The training program #####################################


@pytest.mark.parametrize(
    ("args", "axes"),
    [
        ((), {"dp": 8}),
        (("--mesh=replica=2,dp=2,mp=2", "--zero=3"), {"replica": 2, "dp": 2, "mp": 2}),
    ],
    ids=["replicated", "fsdp-mp"],
)
def test_the_training_step_in_three_forms(capsys, args, axes):
    results = audit.run(parse(*TRAIN, *args))
    cells = table(capsys.readouterr().out)
    assert results["mesh"] == axes
    assert list(cells["one cross-device mean"].values()) == ["no", "no", "yes"]
    programs = results["programs"]
    for axis in axes:
        assert programs["gradaccum"]["bytes"][axis] > 0
    assert programs["naive"]["bytes"]["dp"] > 2 * programs["gradaccum"]["bytes"]["dp"]
    work = [program["flops"] for program in programs.values()]
    assert work[0] == work[1]
    assert work[2] == pytest.approx(work[0], rel=0.1)  # sums of sharded layers are kept


def test_the_fewest_microbatches_that_fit(capsys):
    results = audit.run(parse(*TRAIN, "--microbatches=auto", "--hbm_gb=0.0004"))
    k = results["programs"]["optax.MultiSteps"]["calls"]
    assert 1 < k <= 8
    assert results["flags"]["microbatches"] == "auto"
    assert results["programs"]["gradaccum"]["peak_bytes"] <= 400_000
    assert f"--microbatches=auto: {k}, of what was compiled:" in capsys.readouterr().out


def test_a_form_that_does_not_exist_is_not_faked(capsys):
    results = audit.run(parse(*TRAIN, "--comm_hook=int8_quantize", "--check"))
    cells = table(capsys.readouterr().out)
    assert list(cells["peak memory, bytes"].values())[:2] == ["not written"] * 2
    assert cells["one cross-device mean"]["gradaccum"] == "yes"
    assert results["failed"] is False
    assert {row["kind"] for row in results["programs"]["gradaccum"]["collectives_of_a_call"]} >= {
        "all-to-all",
        "all-gather",
    }


########################################### The counts ###########################################


def count(f, *shapes):
    return audit_cost.flops(jax.jit(f).trace(*(jnp.ones(shape) for shape in shapes)), 1)


def test_flops_of_products_in_loops_branches_and_shards():
    product = 2 * 3 * 4 * 5
    assert count(jnp.dot, (3, 4), (4, 5)) == product
    assert count(lambda x, w: jnp.einsum("bij,bjk->bik", x, w), (7, 3, 4), (7, 4, 5)) == 7 * product
    scanned = lambda x, w: jax.lax.map(lambda x: x @ w, x)  # noqa: E731
    assert count(scanned, (7, 3, 4), (4, 5)) == 7 * product
    assert count(lambda x, w: jax.lax.map(lambda y: scanned(y, w), x), (2, 7, 3, 4), (4, 5)) == (
        14 * product
    )
    branches = lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x[:, :1] * w[:1])  # noqa: E731
    assert count(branches, (3, 4), (4, 5)) == product
    mesh = meshes.make({"dp": 8}, "--mesh=dp=8")
    P = jax.sharding.PartitionSpec
    shards = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))
    assert count(shards, (24, 4), (4, 5)) == 8 * product
    image, kernel = (1, 2, 8, 8), (6, 2, 3, 3)
    conv = lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID")  # noqa: E731
    assert count(conv, image, kernel) == 2 * (6 * 6 * 6) * (2 * 3 * 3)


def test_flops_of_a_loop_without_a_count_are_unknown():
    def until(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)

    assert count(until, (3, 3), (3, 3)) is None
    assert count(lambda x: jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, x), (3,)) == 0


def test_what_is_unknown_is_a_question_mark(tmp_path):
    """A loop whose trip count no compiler knows, with a reduction in it."""
    text = EXAMPLE.replace(
        "loss, grads = jax.value_and_grad(loss_fn)(params, batch)",
        "loss, grads = jax.lax.while_loop(lambda c: c[0] < batch.sum(), "
        "lambda c: jax.value_and_grad(loss_fn)(c[1], batch), (0.0, params))",
    )
    path = write(tmp_path, text)
    results = audit.run(parse(f"--program={path}:describe"))
    (program,) = results["programs"].values()
    assert program["flops"] is None
    assert program["bytes"] == {"dp": None}
    assert "runs an unknown number of times a call" in program["refusal"]


def test_a_backend_without_estimates_and_one_that_does_not_know():
    class Nothing:
        def cost_analysis(self):
            raise NotImplementedError

    class Unknown:
        def cost_analysis(self):
            return {"flops": -1.0, "bytes accessed": 2.0}

    assert audit_cost.of_compiler(Nothing()) == {}
    assert audit_cost.of_compiler(Unknown()) == {"bytes accessed": 2.0}


######################################## The real command ########################################


def run(*args):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    command = [sys.executable, "-m", "absl_apps.audit", *args]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=300, check=False
    )


@pytest.mark.parametrize("devices", ["--topology=v5e:2x4", "--gpu=H100"])
def test_the_command(devices):
    result = run(devices, "--check", *SEED)
    assert (result.returncode, result.stderr) == (0, "")
    assert list(table(result.stdout)["collectives"]) == NAMES


def test_the_command_exits_with_1_where_the_check_fails(tmp_path):
    nothing = EXAMPLE.replace("- 0.1 * grads", "")
    result = run(f"--program={write(tmp_path, nothing)}:describe", "--check")
    assert (result.returncode, result.stderr) == (1, "")
    assert "describe: not one cross-device mean: no gradient is reduced over dp=8" in result.stdout
