"""The fewest microbatches that fit, by the compiler's own figures; and the program for it."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import gradaccum
from absl_apps import plan as plan_program
from absl_apps import train_flags, train_program
from gradaccum import aot

KS = (1, 2, 4, 8, 16, 32)


def maker(mesh, compiled=None):
    """make_step of a wide MLP; `compiled` collects for which k it was asked."""

    def make_step(k):
        if compiled is not None:
            compiled.append(k)

        @gradaccum.accumulate(microbatches=k, axis_name="dp", mesh=mesh)
        def loss(w, x):
            return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w.T) ** 2)

        return jax.jit(jax.value_and_grad(loss))

    return make_step


def arguments(mesh, rows=4096):
    def shaped(shape, *spec):
        return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P(*spec)))

    return shaped((16, 256)), shaped((rows, 16), "dp")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("dp",), (jax.sharding.AxisType.Auto,))


@pytest.fixture(scope="module")
def peaks(mesh):
    """Peak memory by number of microbatches, each compiled here."""
    return {k: aot.peak_bytes(maker(mesh)(k).lower(*arguments(mesh)).compile()) for k in KS}


@pytest.mark.parametrize("want", KS)
def test_the_answer_fits_and_the_next_fewer_does_not(mesh, peaks, want):
    compiled = []
    limit = peaks[want]
    plan = aot.plan_microbatches(
        maker(mesh, compiled), *arguments(mesh), candidates=reversed(KS), memory_limit=limit
    )
    assert (plan.microbatches, plan.peak_bytes, plan.memory_limit) == (want, limit, limit)
    tried = {trial.microbatches: trial for trial in plan.trials}
    assert list(tried) == sorted(compiled)  # each was compiled once
    assert compiled[0] == 1
    assert len(compiled) <= 4  # of six
    assert {k: trial.peak_bytes for k, trial in tried.items()} == {k: peaks[k] for k in tried}
    assert all(trial.fits == (trial.peak_bytes <= limit) for trial in plan.trials)
    if want > 1:
        assert not tried[want // 2].fits
    printed = str(plan)
    assert f"limit: {limit:,} bytes" in printed
    assert re.search(rf"^ +{want}  +{limit:,} .* yes ", printed, re.M)


def test_a_byte_below_it_takes_more(mesh, peaks):
    plan = aot.plan_microbatches(
        maker(mesh), *arguments(mesh), candidates=KS, memory_limit=peaks[4] - 1
    )
    assert plan.microbatches == 8


def test_the_fewest_are_found_where_peaks_rise_at_first():
    """As where one microbatch, which has no loop, takes less than two."""
    sizes = {1: 1000, 2: 8000, 4: 4000, 8: 2000}

    def make_step(k):
        return lambda: jnp.zeros(sizes[k], "float32") + jnp.arange(sizes[k])

    for limit, want in ((4000, 1), (3999, None)):
        if want:
            plan = aot.plan_microbatches(make_step, candidates=sizes, memory_limit=limit)
            assert [trial.microbatches for trial in plan.trials] == [want]
        else:
            with pytest.raises(ValueError, match=r"with 1 microbatches, is 4,000 bytes"):
                aot.plan_microbatches(make_step, candidates=sizes, memory_limit=limit)


# The second jaxlib 0.10 knows, and libtpu does not: it is told by the compiler, later.
UNKNOWN_FLAGS = ["--xla_no_such_flag=1", "--xla_cpu_use_fusion_emitters=false"]


@pytest.mark.slow
@pytest.mark.parametrize("flag", UNKNOWN_FLAGS)
def test_a_compiler_that_ends_the_process_is_heard(flag):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    environment |= {
        "PYTHONPATH": str(pathlib.Path(aot.__file__).parents[2]),
        "XLA_FLAGS": flag,
    }
    result = subprocess.run(
        [sys.executable, "-m", "absl_apps.plan", *TINY, "--topology=v5e:2x4"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert result.returncode != 0
    assert flag.partition("=")[0] in result.stderr


def test_nothing_fits(mesh, peaks):
    with pytest.raises(ValueError, match=r"no candidate fits") as error:
        aot.plan_microbatches(
            maker(mesh), *arguments(mesh), candidates=KS, memory_limit=peaks[32] - 1
        )
    text = str(error.value)
    assert f"with 32 microbatches, is {peaks[32]:,} bytes" in text
    assert f"Required: at most {peaks[32] - 1:,}. Allow more microbatches, donate" in text
    held = 4 * (16 * 256 + 4096 // 8 * 16)
    assert f"(arguments {held:,}, " in text
    assert "limit: " in text
    with pytest.raises(ValueError, match=rf"The arguments alone take {held:,}: split parameters"):
        aot.plan_microbatches(maker(mesh), *arguments(mesh), candidates=[8], memory_limit=held - 1)


def test_a_program_that_the_compiler_refuses_does_not_fit():
    mesh = aot.tpu_mesh("v5e:2x4", {"dp": 8})
    # At 2,048 microbatches activations are 2^18 rows of 2 KB; with one they do not fit the chip.
    w, x = arguments(mesh, rows=2**27)
    plan = aot.plan_microbatches(maker(mesh), w, x, candidates=(1, 2048))
    assert plan.memory_limit == int(15.75 * 2**30)
    first, second = plan.trials
    assert (first.microbatches, first.fits, first.peak_bytes) == (1, False, None)
    assert "RESOURCE_EXHAUSTED" in first.refusal
    assert (second.microbatches, second.fits, plan.microbatches) == (2048, True, 2048)
    assert "refused" in str(plan)
    with pytest.raises(ValueError, match=r"with 1 microbatches the compiler says: RESOURCE_EX"):
        aot.plan_microbatches(maker(mesh), w, x, candidates=[1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"candidates": []}, ValueError, r"candidates are \[\]\. Required: at least one"),
        ({"candidates": [4, 0]}, ValueError, r"candidates are \[4, 0\]"),
        ({"candidates": 4}, ValueError, r"candidates are 4\. Required: at least one"),
        ({"candidates": [1.0]}, ValueError, r"candidates are \[1\.0\]"),
        ({"candidates": [1], "memory_limit": 0}, ValueError, r"memory_limit is 0\. Required: an"),
        ({"candidates": [1], "memory_limit": 1e9}, ValueError, r"memory_limit is 1000000000\.0"),
        ({"candidates": [1]}, ValueError, r"is None, and a device of kind 'cpu' has no limit"),
        ({"candidates": [3], "memory_limit": 9}, ValueError, r"not divisible by\s+microbatches"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_mistakes(mesh, options, error, message):
    with pytest.raises(error, match=message):
        aot.plan_microbatches(maker(mesh), *arguments(mesh), **options)


def test_make_step_is_a_function_of_k(mesh):
    with pytest.raises(TypeError, match=r"make_step is 4\. Required: a function"):
        aot.plan_microbatches(4, candidates=[1], memory_limit=1)
    with pytest.raises(TypeError, match=r"make_step\(1\) returned an object of type int"):
        aot.plan_microbatches(lambda k: k, *arguments(mesh), candidates=[1], memory_limit=1)


def test_a_compiled_step_is_refused():
    with pytest.raises(TypeError, match=r"make_step\(2\) returned a compiled program\. Required"):
        aot.plan_microbatches(
            lambda k: jax.jit(lambda: k).lower().compile(), candidates=[2], memory_limit=9
        )


def test_numpy_integers_are_integers():
    plan = aot.plan_microbatches(
        lambda k: lambda x: x * k,
        jnp.ones(9),
        candidates=np.array([2, 1]),
        memory_limit=np.int64(100),
    )
    assert (plan.microbatches, plan.memory_limit) == (1, 100)


def test_a_plain_function_is_jitted_and_arrays_are_arguments():
    plan = aot.plan_microbatches(
        lambda k: lambda x: x * k, jnp.ones(1000), candidates=[1], memory_limit=8000
    )
    assert plan.peak_bytes == 8000


########################################## The program ###########################################

TINY = ("--d_model=16", "--n_layer=1", "--n_head=2", "--seq_len=16", "--global_batch=64")


def parse(*args):
    values = flags.FlagValues()
    plan_program.parse(["plan", *args], values, "The manual.")
    return values


def test_the_plan_of_the_training_step(capsys, tmp_path):
    path = tmp_path / "plan.json"
    results = plan_program.plan(parse(*TINY, "--hbm_gb=0.0004", f"--json={path}"))
    found = results["plan"]
    program = train_program.describe(
        results["flags"], jax.make_mesh((8,), ("dp",), (jax.sharding.AxisType.Auto,))
    )
    peaks = {
        k: aot.peak_bytes(program.step(k).lower(*program.args).compile()) for k in (1, 2, 4, 8)
    }
    fitting = [k for k, peak in peaks.items() if peak <= 400_000]
    assert found["microbatches"] == min(fitting) > 1
    assert found["peak_bytes"] == peaks[found["microbatches"]]
    printed = capsys.readouterr().out
    assert f"--microbatches={found['microbatches']}: the fewest that fit" in printed
    assert "8 devices, cpu, mesh dp=8; ZeRO stage 0" in printed
    assert json.loads(path.read_text())["plan"]["memory_limit"] == 400_000


@pytest.mark.parametrize(
    "where", [("--topology=v5e:2x2", "--num_slices=2"), ("--gpu=H100", "--hosts=2")]
)
def test_for_devices_that_are_not_here(capsys, where):
    found = plan_program.plan(parse(*TINY, "--zero=3", *where))
    assert found["plan"]["microbatches"] == 1
    sizes = {"replica": 2, "dp": 4} if "topology" in where[0] else {"replica": 2, "dp": 8}
    assert found["mesh"] == sizes
    assert f"{math.prod(sizes.values())} devices" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), r"^--hbm_gb: a device of kind cpu has no limit of its own; say how many"),
        (("--hbm_gb=0.00001",), r"no candidate fits: .*The arguments alone take"),
        (("--hbm_gb=1", "--global_batch=60"), r"^--global_batch=60: not divisible by"),
        (("--hbm_gb=1", "--mesh=dp=16"), r"^--mesh=dp=16: needs 16 devices, found 8"),
        (
            ("--topology=v5e:2x4", "--mesh=dp=4"),
            r"^--topology=v5e:2x4 --mesh=dp=4: .* has 8 devices",
        ),
        (("--topology=v5e:2x4", "--mesh=dp=1,mp=8"), r"n_head"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_what_does_not_fit_is_told(args, message):
    with pytest.raises(ValueError, match=message):
        plan_program.plan(parse(*TINY, *args))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--topology=v3:2x2", "--gpu=H100"), r"give one of them"),
        (("--num_slices=2",), r"it needs --topology"),
        (("--hosts=2",), r"it needs --gpu"),
        (("--hbm_gb=0",), r"must be more than 0"),
        (("--microbatches=2",), r"Unknown command line flag 'microbatches'"),
        (("--json=/nowhere/x.json",), r"there is no directory /nowhere"),
        (("--json=/",), r"is a directory; name a file in it"),
        (("--hbm_gb=1e300",), r"less than a billion"),
        (("--workdir=x",), r"Unknown command line flag 'workdir'"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_bad_flags_are_one_line(args, message):
    with pytest.raises(SystemExit, match=message) as error:
        parse(*args)
    assert "\n" not in error.value.code


def test_help_is_complete(capsys):
    values = flags.FlagValues()
    plan_program.define(values)
    grouped = [name for group in plan_program.GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(values)
    with pytest.raises(SystemExit):
        parse("--help")
    assert re.findall(r"^  --(\w+)$", capsys.readouterr().out, re.M) == grouped
    assert set(grouped) & set(train_flags.GROUPS["Model"])
