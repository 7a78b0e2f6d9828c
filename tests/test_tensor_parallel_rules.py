"""The rules of tensor parallelism broken one at a time: what is refused, and what goes wrong."""

import re

import pytest
from comparison import parse, remembering, run, run_printed

from absl_apps import tensor_parallel
from absl_apps.tensor_parallel_models import MODELS
from absl_apps.tensor_parallel_rules import RULES, Rule

TRANSFORMERS = ("transformer", "sequence_parallel")


@pytest.fixture(autouse=True, scope="module")
def references():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_parallel, "unsharded", remembering(tensor_parallel.unsharded))
        yield


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Each rule's run: its failures, its JSON by model, the leaves by path, what it printed."""
    found = {}
    for rule in RULES:
        path = tmp_path_factory.mktemp(rule) / "run.json"
        args = (f"--break_rule={rule}", "--meshes=dp=1,mp=4")
        failures, results, printed = run_printed(path, *args)
        runs = {r["model"]: r for r in results["runs"]}
        leaves = {name: {x["path"]: x for x in r["leaves"]} for name, r in runs.items()}
        found[rule] = failures, runs, leaves, printed
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
    (failure,) = tensor_parallel.run(parse("--break_rule=bias_before_sum"))
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
