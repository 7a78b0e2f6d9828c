"""The flags of the tensor-parallel comparison: defaults, topologies, mistakes, help."""

import re
import sys

import pytest
from absl import flags
from comparison import TINY, parse, run, run_json

from absl_apps import meshes, tensor_parallel, tensor_parallel_flags


def test_without_meshes_the_issues_four():
    chosen = {"meshes": None, "break_rule": None, "topology": None}
    grids = tensor_parallel_flags.chosen_meshes(chosen)
    assert [tuple(axes.values()) for axes in grids.values()] == [(1, 4), (2, 4), (4, 2), (8, 1)]
    grids = tensor_parallel_flags.chosen_meshes(chosen | {"break_rule": "no_f"})
    assert list(grids) == ["dp=2,mp=4"]
    grids = tensor_parallel_flags.chosen_meshes(chosen | {"topology": "v5e:2x4"})
    assert list(grids) == ["dp=4,mp=2"]


########################################## Topologies ############################################


def test_what_is_only_compiled_is_audited_and_not_compared(capsys, monkeypatch, tmp_path):
    made = []

    def make(*asked):
        made.append(asked)
        return meshes.make({"dp": 4, "mp": 2}, "")

    monkeypatch.setattr(tensor_parallel.aot, "tpu_mesh", make)
    args = ("--topology=v5e:2x4", "--models=transformer")
    failures, results = run_json(tmp_path / "run.json", *args)
    assert failures == []
    assert made == [("v5e:2x4", {"dp": 4, "mp": 2})]
    assert results["devices"]["ran"] is False
    assert "leaves" not in results["runs"][0]
    printed = capsys.readouterr().out
    assert "one reduction over dp, checked in the compiled program" in printed
    assert "difference" not in printed
    assert tensor_parallel.faults({"problem": "twice"}, 2e-5) == ["twice"]


def test_a_topology_without_libtpu_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ValueError, match=r"'v5e:2x4' .* pip install 'gradaccum\[aot-tpu\]'"):
        run("--topology=v5e:2x4")


def test_a_topology_is_filled():
    with pytest.raises(ValueError, match=r"v5e:2x4 has 8 devices, axes dp=2 \* mp=2 = 4 take 4"):
        run("--topology=v5e:2x4", "--meshes=dp=2,mp=2")


def test_an_unknown_topology_is_one_line():
    with pytest.raises(ValueError, match=r"topology 'v9:2x2' is not known [^\n]* v3:2x2, [^\n]*$"):
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
            ["--meshes=dp=1,mp=8", "--models=transformer"],
            r"--meshes=dp=1,mp=8: transformer: n_head = 4 is not .* 8 devices .*; take 8 heads",
        ),
        (
            ["--meshes=dp=1,mp=2", "--seq_len=5"],
            r"sequence_parallel: seq_len = 5 .* the 2 devices along mp; take 6\.",
        ),
        (["--d_model=10"], r"transformer: d_model = 10 is not divisible by 2 \* n_head = 2 \* 4"),
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
