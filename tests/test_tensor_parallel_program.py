"""The tensor-parallel comparison: what it prints and finds, broken rules, mistakes, the command."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from absl_apps import meshes, tensor_parallel, tensor_parallel_flags, topologies
from absl_apps.tensor_parallel_models import MODELS
from absl_apps.tensor_parallel_report import compare, leaves_table, summary, too_large
from absl_apps.tensor_parallel_rules import RULES, Rule

TINY = (
    "--d_model=8",
    "--n_layer=2",
    "--n_head=2",
    "--seq_len=4",
    "--batch_size=8",
    "--microbatches=2",
)
LEAVES = {"haiku": 12, "transformer": 10, "sequence_parallel": 10}  # the loss among them
TRANSFORMERS = ("transformer", "sequence_parallel")
ONE = "one reduction over dp, checked in the compiled program"


def parse(*args):
    values = flags.FlagValues()
    tensor_parallel_flags.parse(["tensor_parallel", *args], values, manual="The manual.")
    return values


def run(*args):
    return tensor_parallel.run(parse(*TINY, *args))


def run_json(path, *args):
    failures = run(*args, f"--json={path}")
    return failures, json.loads(path.read_text())


############################################ A run ###############################################


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """Every model on a mesh of both axes, and one without model parallelism."""
    path = tmp_path_factory.mktemp("run") / "run.json"
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *args, **_: lines.append(" ".join(args)))
        failures, results = run_json(path, "--meshes=dp=2,mp=2", "--meshes=dp=4,mp=1")
    return failures, results, "\n".join(lines)


def test_every_leaf_is_within_the_tolerance(sound):
    failures, results, printed = sound
    assert failures == []
    assert results["tolerance"] == 2e-5
    runs = results["runs"]
    assert [(r["mesh"], r["model"]) for r in runs] == [
        ({"dp": n, "mp": m}, name) for n, m in ((2, 2), (4, 1)) for name in MODELS
    ]
    for r in runs:
        assert len(r["leaves"]) == LEAVES[r["model"]]
        assert max(x["difference"] for x in r["leaves"]) <= 2e-5
        assert not any(x["copies_differ"] for x in r["leaves"])
        # Exactly equal, it would be compared with itself.
        assert max(x["difference"] for x in r["leaves"]) > 1e-8
    for mesh in "dp=2,mp=2", "dp=4,mp=1":
        line = rf"^{mesh}: of 32 losses and gradients none differ by more than 2e-05; the largest"
        assert re.search(line, printed, re.M)


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
    """Over dp one all-reduce of a device's gradients and the loss; over mp none where mp is 1."""
    _, results, printed = sound
    assert printed.count(ONE) == 6
    for r in results["runs"]:
        rows = {(x["axes"], x["kind"], x["in_loop"]): x for x in r["collectives"]}
        (mean,) = (rows.pop(key) for key in list(rows) if key[0] == "dp")
        shards = r["mesh"]["mp"]
        held = [math.prod(x["shape"]) // (shards if "mp" in x["spec"] else 1) for x in r["leaves"]]
        assert (mean["kind"], mean["in_loop"], mean["executions"]) == ("all-reduce", False, 1)
        assert mean["bytes"] == 4 * sum(held)
        assert r["problem"] is None
        assert {axes for axes, *_ in rows} == ({"mp"} if shards > 1 else set())
        kinds = {kind for _, kind, in_loop in rows if in_loop}
        assert kinds == (
            set()
            if shards == 1
            else {"all-reduce", "all-gather", "reduce-scatter"}
            if r["model"] == "sequence_parallel"
            else {"all-reduce"}
        )
    text = printed.split("dp=2,mp=2 haiku\n")[1].split("\n\n")[0]
    total = sum(x["executions"] for x in results["runs"][0]["collectives"] if x["axes"] == "mp")
    assert re.search(r"^  axis +collective +in a loop +executions +bytes$", text, re.M)
    assert re.search(r"^  dp +all-reduce +no +1 +[\d,]+$", text, re.M)
    assert re.search(rf"^  mp +all-reduce +yes +{total} +[\d,]+$", text, re.M)
    assert re.search(rf"^  mp +total +{total} +[\d,]+$", text, re.M)


def test_json_says_what_was_run(sound):
    _, results, _ = sound
    assert results["flags"]["d_model"] == 8
    assert results["flags"]["meshes"] == ["dp=2,mp=2", "dp=4,mp=1"]
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
    assert run("--check_vma", "--meshes=dp=1,mp=2") == []
    printed = capsys.readouterr().out
    assert "check_vma=True" in printed
    assert printed.count("dp has one device: nothing to reduce over it") == len(MODELS)


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


def test_without_meshes_the_issues_four():
    chosen = {"meshes": None, "break_rule": None, "topology": None}
    grids = tensor_parallel_flags.chosen_meshes(chosen)
    assert [tuple(axes.values()) for axes in grids.values()] == [(1, 4), (2, 4), (4, 2), (8, 1)]
    grids = tensor_parallel_flags.chosen_meshes(chosen | {"break_rule": "no_f"})
    assert list(grids) == ["dp=2,mp=4"]
    grids = tensor_parallel_flags.chosen_meshes(chosen | {"topology": "v5e:2x4"})
    assert list(grids) == ["dp=4,mp=2"]


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


######################################## A broken rule ###########################################


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Each rule's run: its failures, its JSON by model with leaves by path, what it printed."""
    found = {}
    for rule in RULES:
        path, lines = tmp_path_factory.mktemp(rule) / "run.json", []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("builtins.print", lambda *args, **_: lines.append(" ".join(args)))  # noqa: B023
            sizes = ("--d_model=16", "--n_head=4", "--meshes=dp=1,mp=4")
            failures, results = run_json(path, f"--break_rule={rule}", *sizes)
        runs = {r["model"]: r for r in results["runs"]}
        leaves = {name: {x["path"]: x for x in r["leaves"]} for name, r in runs.items()}
        found[rule] = failures, runs, leaves, "\n".join(lines)
    return found


def right(leaves):
    return {path for path, x in leaves.items() if x["difference"] <= 2e-5}


@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_refused_and_shown(rule, broken):
    """By accumulate, and then in a plain shard_map every model goes wrong: status 1."""
    failures, runs, leaves, printed = broken[rule]
    assert list(runs) == (["haiku"] if RULES[rule].needs_bias else list(MODELS))
    assert len(failures) == len(runs)
    for (name, r), failure in zip(runs.items(), failures, strict=True):
        assert r["refusal"].startswith("accumulate: ")
        assert f"  gradaccum.accumulate refuses this: {r['refusal']}" in printed
        wrong = [path for path in leaves[name] if path not in right(leaves[name])]
        assert failure == f"dp=1,mp=4 {name}: differs by more than 2e-05: {', '.join(wrong)}"
    assert f"broken rule: {rule}. {RULES[rule].lesson}" in printed
    left_out = "Left out, as there a bias follows no sum: transformer, sequence_parallel."
    assert (left_out in printed) == RULES[rule].needs_bias
    assert re.search(r"^  leaf +shape +spec +difference +factor$", printed, re.M)


def test_the_refusals_name_the_operator(broken):
    for rule, operator in ("no_f", "copy_to"), ("plain_psum", "reduce_from"):
        for r in broken[rule][1].values():
            assert f"gradaccum.tensor_parallel.{operator}" in r["refusal"]
    # What reaches the sum is a value that is whole and is added by every device.
    assert re.search(r"the same on all devices of mp .*\(add at .*_add_bias", refusal(broken))


def refusal(broken):
    return broken["bias_before_sum"][1]["haiku"]["refusal"]


def test_without_f_only_the_last_projection_is_right(broken):
    _, _, models, printed = broken["no_f"]
    assert right(models["haiku"]) == {"loss", "projection/b", "projection/w"}
    for name in TRANSFORMERS:
        assert right(models[name]) == {"loss", "head"}
    for leaves in models.values():
        assert all(x["factor"] < 0.9 for path, x in leaves.items() if path not in right(leaves))
    # Each device has a part of its own; where activations are split, copy_to still adds up scales.
    differ = {name: {p for p, x in v.items() if x["copies_differ"]} for name, v in models.items()}
    assert differ == {
        "haiku": {"feed_forward/down_bias", "feed_forward_1/down_bias"},
        "transformer": {"final_scale", "layers/attention_scale", "layers/mlp_scale"},
        "sequence_parallel": set(),
    }
    assert re.search(r"^  final_scale .*, copies differ$", printed, re.M)


def test_with_a_plain_psum_gradients_are_too_large_by_a_factor_for_each_sum(broken):
    _, _, models, _ = broken["plain_psum"]
    leaves = models["haiku"]
    after = {"loss", "projection/b", "projection/w", "feed_forward_1/down_bias"}
    assert right(leaves) == after
    for name in "up", "up_bias", "down":  # before one sum
        assert leaves[f"feed_forward_1/{name}"]["factor"] == pytest.approx(4, rel=1e-5)
        assert 4 < leaves[f"feed_forward/{name}"]["factor"] < 4 * 4  # two, and the way around one
    for name in TRANSFORMERS:
        assert right(models[name]) == {"loss", "head", "final_scale"}
        assert all(models[name][f"layers/{x}"]["factor"] > 4 for x in ("qkv", "proj", "up", "down"))


def test_with_the_bias_before_the_sum_nothing_is_right(broken):
    _, _, models, _ = broken["bias_before_sum"]
    assert right(models["haiku"]) == set()


def test_the_manual_s_numbers_of_the_bias(capsys):
    """With the default sizes."""
    args = ("--break_rule=bias_before_sum", "--microbatches=1")
    (failure,) = tensor_parallel.run(parse(*args))
    assert failure.count(",") == 1 + 11
    assert re.search(r"^  loss +P\(\) +3\.5e-02 +1\.035$", capsys.readouterr().out, re.M)
    assert "a loss 3.5 % too large" in tensor_parallel.__doc__


def test_a_rule_that_is_not_broken_shows_nothing(capsys, monkeypatch):
    """So it is the rule that shows, not the plain shard_map."""
    monkeypatch.setitem(RULES, "no_f", Rule(lambda layers, axis: layers, "None."))
    assert run("--break_rule=no_f", "--meshes=dp=2,mp=2", "--models=haiku") == []
    printed = capsys.readouterr().out
    assert "gradaccum.accumulate does not see this" in printed
    assert "of 12 losses and gradients none differ" in printed


########################################## Topologies ############################################


def test_what_is_only_compiled_is_audited_and_not_compared(capsys, monkeypatch, tmp_path):
    made = []

    def make(*asked):
        made.append(asked)
        return meshes.make({"dp": 4, "mp": 2}, "")

    monkeypatch.setattr(tensor_parallel.topologies, "make", make)
    args = ("--topology=v5e:2x4", "--models=transformer")
    failures, results = run_json(tmp_path / "run.json", *args)
    assert failures == []
    assert made == [("v5e:2x4", {"dp": 4, "mp": 2}, "--meshes=dp=4,mp=2")]
    assert results["devices"]["ran"] is False
    assert "leaves" not in results["runs"][0]
    printed = capsys.readouterr().out
    assert ONE in printed
    assert "difference" not in printed
    monkeypatch.setattr(tensor_parallel, "accumulated", naive)
    (failure,) = run(*args, "--batch_size=8", "--microbatches=2")
    assert "2 times a call" in failure


def test_a_topology_without_libtpu_names_the_extra(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"v5e:2x4: .* pip install 'gradaccum\[aot-tpu\]'"):
        run("--topology=v5e:2x4")


@pytest.fixture
def libtpu(monkeypatch):
    """A libtpu that knows one slice."""

    def get_topology_desc(platform, topology_name, num_slices):
        assert (platform, num_slices) == ("tpu", 1)
        if topology_name != "v5e:2x4":
            raise RuntimeError("INVALID_ARGUMENT: Invalid TPU external name\nand more")
        return types.SimpleNamespace(devices=jax.devices())

    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: object())
    fake = types.SimpleNamespace(get_topology_desc=get_topology_desc)
    monkeypatch.setattr(topologies, "topologies", fake)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


@pytest.mark.usefixtures("libtpu")
def test_a_topology_is_filled():
    mesh = topologies.make("v5e:2x4", {"dp": 4, "mp": 2}, "--meshes=dp=4,mp=2")
    assert dict(mesh.shape) == {"dp": 4, "mp": 2}
    with pytest.raises(ValueError, match=r"v5e:2x4: has 8 devices, --meshes=dp=2,mp=2 takes 4; "):
        run("--topology=v5e:2x4", "--meshes=dp=2,mp=2")


@pytest.mark.usefixtures("libtpu")
def test_an_unknown_topology_is_one_line():
    with pytest.raises(ValueError, match=r"^--topology=v9:2x2: INVALID\S+ [^\n]*; write for ex"):
        run("--topology=v9:2x2")


############################################ Mistakes ############################################


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--models=haiku,bert"], r"bert unknown; choose of haiku, transformer, sequence_parallel"),
        (["--models=haiku,haiku"], r"got haiku, haiku; .* each once"),
        (["--models="], r"got none"),
        (["--dtype=bfloat16"], r"float32\|float64"),
        (["--break_rule=no_g"], r"no_f\|bias_before_sum\|plain_psum"),
        (["--break_rule=no_f", "--check_vma"], r"types unchecked; leave out --check_vma\."),
        (["--break_rule=no_f", "--topology=v5e:2x4"], r"runs here, .* leave out --topology\."),
        (["--dtype=float64", "--topology=v5e:2x4"], r"no maximum over devices in float64"),
        (["--tolerance=nan"], r"must be finite"),
        (["--tolerance=-1"], r"--tolerance=-1"),
        (["--microbatches=0"], r"--microbatches=0"),
        (["--batch_size=0"], r"--batch_size=0"),
        (["--seed=-1"], r"--seed=-1"),
        (["--json=/nowhere/x.json"], r"there is no directory /nowhere"),
        (["--mesh=dp=2,mp=4"], r"Unknown command line flag 'mesh'"),
        (["dp=2,mp=4"], r"'dp=2,mp=4' is not a flag"),
    ],
    ids=lambda value: "-".join(value).replace("/", "_") if isinstance(value, list) else "",
)
def test_bad_flags_are_one_line(args, message):
    with pytest.raises(SystemExit, match=message) as exit_:
        parse(*args)
    assert exit_.value.code.startswith("tensor_parallel: ")
    assert "\n" not in exit_.value.code


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--meshes=mp=2,dp=4"], r"--meshes=mp=2,dp=4: needed sizes >= 1 of dp and mp, in this or"),
        (["--meshes=dp=8"], r"--meshes=dp=8: needed sizes"),
        (["--meshes=dp=2,mp=0"], r"--meshes=dp=2,mp=0: needed sizes"),
        (["--meshes=dp=1,mp=2;8"], r"--meshes=8: needed .* --meshes='dp=2,mp=4;dp=4,mp=2'"),
        (
            ["--meshes=dp=8,mp=2", "--batch_size=16"],
            r"--meshes=dp=8,mp=2: needs 8 \* 2 = 16 devices, found 8 \(cpu\); use 8 or fewer",
        ),
        (
            ["--meshes=dp=4,mp=2", "--batch_size=20"],
            r"dp=4,mp=2: --batch_size=20 is not .* 2 \* 4 = 8; the nearest that is: 16 or 24\.",
        ),
        (
            ["--meshes=dp=4,mp=2", "--batch_size=7"],
            r"--batch_size=7 is not divisible .* the nearest that is: 8\.",
        ),
        (
            ["--meshes=dp=1,mp=3", "--models=haiku"],
            r"--meshes=dp=1,mp=3: haiku_model: .* take d_model = 9; vocabulary = 256: pad it to 25",
        ),
        (
            ["--meshes=dp=1,mp=4", "--models=transformer"],
            r"--meshes=dp=1,mp=4: transformer: n_head = 2 is not .* 4 devices .*; take 4 heads",
        ),
        (
            ["--meshes=dp=1,mp=2", "--seq_len=5"],
            r"sequence_parallel: seq_len = 5 .* the 2 devices along mp; take 6\.",
        ),
        (["--d_model=10"], r"transformer: d_model = 10 is not divisible by 2 \* n_head = 2 \* 2"),
        (["--break_rule=no_f", "--meshes=dp=2,mp=1"], r"one device along mp no rule can be broken"),
        (
            ["--break_rule=bias_before_sum", "--models=haiku,transformer"],
            r"--break_rule=bias_before_sum: transformer has no bias; leave it out of --models\.",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_run_is_refused_first(args, message, capsys):
    with pytest.raises(ValueError, match=message) as error:
        run(*args)
    assert "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


def test_models_that_are_not_asked_for_may_not_divide(monkeypatch):
    """seq_len=5 is the sequence-parallel transformer's alone."""
    values = parse(*TINY, "--seq_len=5", "--meshes=dp=1,mp=2", "--models=haiku,transformer")
    chosen = {n: values[n].value for group in tensor_parallel_flags.GROUPS.values() for n in group}
    tensor_parallel_flags.check(chosen)


############################################# Flags ##############################################


def test_help_is_complete(capsys):
    values = flags.FlagValues()
    tensor_parallel_flags.define(values)
    grouped = [name for group in tensor_parallel_flags.GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(values)
    with pytest.raises(SystemExit) as exit_:
        parse("--help")
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("The manual.\n")
    assert re.findall(r"^  --(\w+)$", printed, re.M) == grouped
    assert "If not given: dp=1,mp=4;dp=2,mp=4;dp=4,mp=2;dp=8,mp=1;" in " ".join(printed.split())
    assert "If not given: 2e-05 for float32, 1e-12 for float64." in printed


######################################## The real command ########################################


def command(*args):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return subprocess.run(
        [sys.executable, "-m", "absl_apps.tensor_parallel", *args],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


def test_the_command():
    result = command(*TINY, "--models=haiku", "--meshes=dp=4,mp=2")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "dp=4,mp=2 haiku\n" in result.stdout
    assert "dp=4,mp=2: of 12 losses and gradients none differ" in result.stdout


def test_the_command_fails_where_a_gradient_is_wrong():
    args = ("--models=haiku", "--break_rule=plain_psum", "--meshes=dp=1,mp=2")
    result = command(*TINY, *args)
    assert result.returncode == 1
    line = "tensor_parallel: dp=1,mp=2 haiku: differs by more than 2e-05: embedding/table, "
    assert result.stderr.startswith(line)
    assert result.stderr.count("\n") == 1


def test_the_command_s_mistakes_are_one_line():
    result = command(*TINY, "--meshes=dp=2")
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(r"tensor_parallel: --meshes=dp=2: needed [^\n]*\n", result.stderr)
