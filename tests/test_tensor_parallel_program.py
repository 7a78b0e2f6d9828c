"""The tensor-parallel comparison: what it prints, what it finds."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import remembering, run, run_json, run_printed
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import meshes, tensor_parallel
from absl_apps.tensor_parallel_models import MODELS
from absl_apps.tensor_parallel_report import compare, leaves_table, summary, too_large

LEAVES = {"haiku": 12, "transformer": 10, "sequence_parallel": 10}  # the loss among them
ONE = "one reduction over dp, checked in the compiled program"


@pytest.fixture(autouse=True, scope="module")
def references():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "unsharded", remembering(tensor_parallel.unsharded))
        yield


############################################ A run ###############################################


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Every model on a mesh of both axes."""
    return run_printed(tmp_path_factory.mktemp("run") / "run.json", "--meshes=dp=2,mp=2")


def test_every_leaf_is_within_the_tolerance(sound):
    failures, results, printed = sound
    assert failures == []
    assert results["tolerance"] == 2e-5
    assert [r["model"] for r in results["runs"]] == list(MODELS)
    for r in results["runs"]:
        assert len(r["leaves"]) == LEAVES[r["model"]]
        assert max(x["difference"] for x in r["leaves"]) <= 2e-5
        assert not any(x["copies_differ"] for x in r["leaves"])
        # Exactly equal, it would be compared with itself.
        assert max(x["difference"] for x in r["leaves"]) > 1e-8
    line = r"^dp=2,mp=2: of 32 losses and gradients none differ by more than 2e-05; the largest"
    assert re.search(line, printed, re.M)


def test_several_meshes(tmp_path, capsys):
    """Where one axis has one device, nothing is communicated over it."""
    meshes_ = "--meshes=dp=4,mp=1", "--meshes=dp=1,mp=2;dp=1,mp=1"
    failures, results = run_json(tmp_path / "run.json", *meshes_, "--models=haiku")
    assert failures == []
    assert [tuple(r["mesh"].values()) for r in results["runs"]] == [(4, 1), (1, 2), (1, 1)]
    axes = [{x["axes"] for x in r["collectives"]} for r in results["runs"]]
    assert axes == [{"dp"}, {"mp"}, set()]
    assert all(x["difference"] <= 2e-5 for r in results["runs"] for x in r["leaves"])
    printed = capsys.readouterr().out
    assert printed.count(ONE) == 1
    assert printed.count("dp has one device: nothing to reduce over it") == 2
    assert results["devices"] == {"platform": "cpu", "kind": "cpu", "count": 4, "ran": True}


def test_leaf_by_leaf(sound):
    *_, printed = sound
    assert printed.startswith("8 sequences of 4 bytes, float32, in 2 microbatches; check_vma=False")
    haiku = printed.split("dp=2,mp=2 haiku\n")[1].split("\n\n")[0]
    assert re.search(r"^  leaf +shape +spec +difference$", haiku, re.M)
    leaf = r"\d\.\de[-+]\d+$"
    assert re.search(rf"^  loss +P\(\) +{leaf}", haiku, re.M)
    assert re.search(rf"^  feed_forward_1/down +32x8 +P\('mp'\) +{leaf}", haiku, re.M)
    assert len(re.findall(leaf, haiku, re.M)) == LEAVES["haiku"]


def test_collectives_by_axis_kind_and_place(sound):
    """Over dp one all-reduce of a device's gradients and the loss, in no loop; the rest in one."""
    _, results, printed = sound
    assert printed.count(ONE) == len(MODELS)
    for r in results["runs"]:
        rows = {(x["axes"], x["kind"], x["in_loop"]): x for x in r["collectives"]}
        (mean,) = (rows.pop(key) for key in list(rows) if key[0] == "dp")
        held = [math.prod(x["shape"]) // (2 if "mp" in x["spec"] else 1) for x in r["leaves"]]
        assert (mean["kind"], mean["in_loop"], mean["executions"]) == ("all-reduce", False, 1)
        assert mean["bytes"] == 4 * sum(held)
        assert r["problem"] is None
        assert {axes for axes, *_ in rows} == {"mp"}
        more = {"all-gather", "reduce-scatter"} if r["model"] == "sequence_parallel" else set()
        assert {kind for _, kind, in_loop in rows if in_loop} == {"all-reduce", *more}
    text = printed.split("dp=2,mp=2 haiku\n")[1].split("\n\n")[0]
    total = sum(x["executions"] for x in results["runs"][0]["collectives"] if x["axes"] == "mp")
    assert re.search(r"^  axis +collective +in a loop +executions +bytes$", text, re.M)
    assert re.search(r"^  dp +all-reduce +no +1 +[\d,]+$", text, re.M)
    assert re.search(rf"^  mp +all-reduce +yes +{total} +[\d,]+$", text, re.M)
    assert re.search(rf"^  mp +total +{total} +[\d,]+$", text, re.M)


def test_json_says_what_was_run(sound):
    _, results, _ = sound
    assert results["flags"]["d_model"] == 8
    assert results["flags"]["meshes"] == ["dp=2,mp=2"]
    assert results["versions"]["jax"] == jax.__version__
    assert results["devices"] == {"platform": "cpu", "kind": "cpu", "count": 4, "ran": True}


def test_float64(tmp_path):
    args = ("--dtype=float64", "--meshes=dp=2,mp=2", "--models=haiku")
    failures, results = run_json(tmp_path / "run.json", *args)
    assert failures == []
    assert results["tolerance"] == 1e-12
    (r,) = results["runs"]
    assert max(x["difference"] for x in r["leaves"]) <= 1e-12
    assert not jax.config.jax_enable_x64  # left as it was


def test_check_vma_and_a_mesh_of_the_model_axis_alone(capsys):
    assert run("--check_vma", "--meshes=dp=1,mp=2", "--models=haiku,sequence_parallel") == []
    printed = capsys.readouterr().out
    assert "check_vma=True" in printed
    assert printed.count("dp has one device: nothing to reduce over it") == 2


def test_options_reach_accumulate_and_the_tokens(monkeypatch):
    asked = []

    def spy(model, layers, mesh, microbatches, check_vma):
        asked.append((microbatches, check_vma))
        return accumulated(model, layers, mesh, microbatches, check_vma)

    def spied_tokens(seed, *args):
        asked.append(seed)
        return tokens(seed, *args)

    accumulated, tokens = tensor_parallel.accumulated, tensor_parallel.tokens
    monkeypatch.setattr(tensor_parallel, "accumulated", spy)
    monkeypatch.setattr(tensor_parallel, "tokens", spied_tokens)
    args = ("--microbatches=4", "--seed=3", "--check_vma", "--meshes=dp=1,mp=2", "--models=haiku")
    assert run(*args) == []
    assert asked == [3, (4, True)]


######################################### What it finds ##########################################


def test_a_tolerance_too_small_names_the_leaves(capsys):
    (failure,) = run("--tolerance=1e-9", "--meshes=dp=2,mp=2", "--models=haiku")
    start = "dp=2,mp=2 haiku: differs by more than 1e-09: "
    assert failure.startswith(start)
    names = failure.removeprefix(start).split(", ")
    assert "feed_forward_1/down" in names
    assert f"of 12 losses and gradients {len(names)} differ by more" in capsys.readouterr().out


def naive(model, layers, mesh, microbatches, check_vma):
    """Right gradients, with a mean over the data axis in every microbatch."""
    del check_vma

    def step(params, batch):
        def one(total, tokens):
            values = jax.value_and_grad(model.loss)(params, tokens, layers)
            return jax.tree.map(jnp.add, total, jax.lax.pmean(values, "dp")), None

        parts = batch.reshape(microbatches, -1, batch.shape[1])
        total, _ = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, (jnp.zeros(()), params)), parts)
        return jax.tree.map(lambda x: x / microbatches, total)

    return jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(model.specs, P("dp")),
        out_specs=(P(), model.specs),
        check_vma=False,
    )


def twice(model, layers, mesh, microbatches, check_vma):
    """Right gradients, the mean of two means."""
    fun = accumulated(model, layers, mesh, microbatches, check_vma)

    def both(params, batch):
        one, other = (fun(params, part) for part in jnp.split(batch, 2))
        return jax.tree.map(lambda a, b: (a + b) / 2, one, other)

    return both


accumulated = tensor_parallel.accumulated


@pytest.mark.parametrize(
    ("broken", "message"),
    [(naive, r"runs 2 times a call, in a loop"), (twice, r"two reductions over dp are added")],
    ids=["in_every_microbatch", "two_means"],
)
def test_more_than_one_reduction_fails_though_the_gradients_are_right(
    broken, message, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(tensor_parallel, "accumulated", broken)
    args = ("--meshes=dp=2,mp=2", "--models=haiku", "--microbatches=2")
    (failure,), results = run_json(tmp_path / "run.json", *args)
    assert failure.startswith("dp=2,mp=2 haiku: ")
    assert re.search(message, failure)
    printed = capsys.readouterr().out
    assert ONE not in printed
    assert re.search(message, printed)
    assert "of 12 losses and gradients none differ" in printed
    assert failure.endswith(results["runs"][0]["problem"])


def test_a_loss_that_communicates_over_the_data_axis_fails(monkeypatch):
    """It is right, as the mean of a mean is, but in every microbatch."""

    def communicating(model, *args):
        def loss(params, tokens, layers):
            return jax.lax.pmean(model.loss(params, tokens, layers), "dp")

        return accumulated(dataclasses.replace(model, loss=loss), *args)

    monkeypatch.setattr(tensor_parallel, "accumulated", communicating)
    with pytest.warns(UserWarning, match="communicates"):
        (failure,) = run("--meshes=dp=2,mp=2", "--models=haiku")
    assert re.search(r"runs 2 times a call, in a loop; required: once, in no loop", failure)


def test_compare_sees_every_device():
    """np.asarray of a replicated array is one device's copy."""
    mesh = meshes.make({"dp": 1, "mp": 2}, "--meshes")
    want = (np.float32(2), {"w": np.array([1, -4], np.float32), "v": np.ones(2, np.float32)})
    specs = {"w": P(), "v": P("mp")}
    copies = [np.array([1, -4]), np.array([1, -3])]
    w = jax.make_array_from_single_device_arrays(
        (2,),
        NamedSharding(mesh, P()),
        [jax.device_put(x, d) for x, d in zip(copies, mesh.devices.flat, strict=True)],
    )
    v = jax.device_put(np.array([1, 3], np.float32), NamedSharding(mesh, P("mp")))
    rows = compare((jnp.float32(2), {"w": w, "v": v}), want, specs)
    table = leaves_table(rows, factors=True)
    rows = {row.pop("path"): row for row in rows}
    exact = {"difference": 0.0, "factor": 1.0, "copies_differ": False}
    assert rows["loss"] == {"shape": [], "spec": "P()", **exact}
    assert rows["w"] == {"shape": [2], "spec": "P()", **exact} | {
        "difference": 0.25,  # of the second device's copy, where the first is right
        "copies_differ": True,
    }
    assert rows["v"]["difference"] == 2
    assert rows["v"]["factor"] == pytest.approx(5**0.5)
    assert not rows["v"]["copies_differ"]
    assert re.search(r"^  w +2 +P\(\) +2\.5e-01 +1\.000, copies differ$", table, re.M)


def test_a_nan_is_too_large_and_the_worst():
    mesh = meshes.make({"dp": 1, "mp": 1}, "--meshes")
    got = (1.0, {"w": np.array([2.0, math.nan])})
    got = jax.device_put(got, NamedSharding(mesh, P()))
    rows = compare(got, (1.0, {"w": np.array([2.0, 2.0])}), {"w": P()})
    assert too_large(rows, 1e30) == ["w"]
    others = [{"path": "x", "difference": 7.0}]
    line = summary({"a": others, "b": rows, "c": others}, 1.0)
    assert line.startswith("of 4 losses and gradients 3 differ by more than 1; the largest ")
    assert line.endswith("nan, b w")
