"""The bench's flags: its mistakes, each one line, and its help."""

import re
import sys

import pytest
from absl import flags
from bench_runs import parse

from absl_apps import bench, bench_flags


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--batch_size=500"],
            r"500 rows are not divisible by grad_acc_steps .* = 64 \* 8 \* 1 = 512; .* is: 512\.",
        ),
        (
            ["--batch_size=100", "--grad_acc_steps=4", "--dp=3"],
            r"100 rows are not divisible by .* 4 \* 3 \* 1 = 12; .* is: 96 or 108\.",
        ),
        (["--num_slices=2"], r"grad_acc_steps \* dp \* num_slices = 64 \* 8 \* 2 = 1024"),
        (["--rounds=0"], r"--rounds=0"),
        (["--dtype=float8"], r"float32\|bfloat16"),
        (["--contenders=naive"], r"got naive; .* gradaccum among them: ratios are to it"),
        (["--contenders=gradaccum,pmap"], r"pmap unknown; choose of naive, multisteps"),
        (["--contenders=gradaccum,gradaccum"], r"each once"),
        (["--problem=calls", "--contenders=naive,gradaccum"], r"naive unknown; choose of optax, g"),
        (["--problem=pmap"], r"steps\|calls"),
        (["--png=/nowhere/x.png"], r"--png=/nowhere/x.png: .* no directory /nowhere"),
        (["--sweep=4,3"], r"'3' microbatches: .* 8 devices divides --batch_size=512"),
        (["--sweep=0"], r"'0' microbatches"),
        (["--sweep=k"], r"'k' microbatches"),
        (["--json=/nowhere/x.json"], r"there is no directory /nowhere"),
        (["--grad_acc=4"], r"Unknown command line flag 'grad_acc'"),
        (["64"], r"'64' is not a flag"),
    ],
    ids=lambda value: "-".join(value).replace("/", "_") if isinstance(value, list) else "",
)
def test_bad_flags_are_one_line(args, message):
    with pytest.raises(SystemExit, match=message) as exit_:
        parse(*args)
    assert "\n" not in exit_.value.code


def test_too_few_devices():
    with pytest.raises(ValueError, match=r"--dp=16: needs 16 devices, found 8 \(cpu\); use 8 or"):
        bench.bench(parse("--dp=16", "--batch_size=1024"))
    with pytest.raises(ValueError, match=r"--num_slices=2 --dp=8: needs 2 \* 8 = 16 devices"):
        bench.bench(parse("--num_slices=2", "--batch_size=1024"))


def test_a_topology_without_libtpu_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ValueError, match=r"'v3:2x2' .* pip install 'gradaccum\[aot-tpu\]'"):
        bench.bench(parse("--topology=v3:2x2"))


def test_help_is_complete(capsys):
    values = flags.FlagValues()
    bench_flags.define(values)
    grouped = [name for group in bench_flags.GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(values)
    with pytest.raises(SystemExit) as exit_:
        parse("--help")
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("The manual.\n")
    assert re.findall(r"^  --(\w+)$", printed, re.M) == grouped
    assert "Microbatches a step, on each device; or calls a window. Default: 64." in printed
