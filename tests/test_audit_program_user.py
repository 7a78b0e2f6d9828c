"""absl_apps.audit with a user's own step, and every mistake in one line."""

import re
import sys

import pytest
from absl import flags
from audit_app import EXAMPLE, parse, table, write

from absl_apps import audit, audit_flags, train_flags

######################################### A user's step ##########################################


def test_the_example_of_the_manual(capsys, tmp_path):
    assert EXAMPLE.count("\n") < 20
    path = write(tmp_path, EXAMPLE)
    results = audit.run(parse(f"--program={path}:describe", "--check", "--topology=v5e:2x4"))
    (program,) = results["programs"].values()
    assert program["bytes"] == {"dp": 256 * 256 * 4 + 4}
    assert program["flops"] == 2 * 2 * 8 * 256 * 256  # no gradient of the batch
    assert program["refusal"] is None
    assert results["failed"] is False
    assert list(next(iter(table(capsys.readouterr().out).values()))) == [f"{path}:describe"]


def test_check_fails_where_it_is_not_one_mean(capsys, tmp_path):
    loop = EXAMPLE.replace(
        "jax.value_and_grad(loss_fn)(params, batch)",
        "jax.lax.map(lambda x: jax.value_and_grad(loss_fn)(params, x), batch.reshape(2, -1, 256))",
    ).replace("grads, loss", "grads.sum(0), loss.sum()")
    program = f"--program={write(tmp_path, loop)}:describe"
    assert audit.run(parse(program, "--check"))["failed"] is True
    assert audit.run(parse(program))["failed"] is False
    assert "describe: not one cross-device mean: " in capsys.readouterr().out


def test_the_data_axes_of_a_users_mesh(capsys, tmp_path):
    path = write(tmp_path, EXAMPLE)
    mesh = f"--program={path}:describe", "--mesh=dp=4,tensor=2"
    results = audit.run(parse(*mesh))
    assert (
        "no gradient is reduced over tensor=2" in results["programs"][f"{path}:describe"]["refusal"]
    )
    named = audit.run(parse(*mesh, "--axis_name=dp"))
    assert named["programs"][f"{path}:describe"]["refusal"] is None
    assert "one cross-device mean over dp" in capsys.readouterr().out


def test_a_mean_in_a_branch_is_allowed_where_that_is_meant(tmp_path):
    branch = EXAMPLE.replace(
        "jnp.mean((batch @ params) ** 2)",
        "jax.lax.cond(params[0, 0] > 0, lambda: jnp.mean((batch @ params) ** 2), lambda: 0.0)",
    )
    program = f"--program={write(tmp_path, branch)}:describe", "--check"
    strict = audit.run(parse(*program))
    assert "stands in a branch" in next(iter(strict["programs"].values()))["refusal"]
    assert strict["failed"]
    assert not audit.run(parse(*program, "--conditional"))["failed"]


HEAD = """
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
def describe(mesh):
"""
X = 'jax.ShapeDtypeStruct((8,), "float32", sharding=NamedSharding(mesh, P("dp")))'


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            '    raise KeyError("tp")',
            r"step\.py, line 5: raise .* -> KeyError: 'tp'$",
        ),
        ("    exit(3)", r"line 5: exit\(3\) -> SystemExit: 3$"),
        ('    P("dp"\n', r"line 5: P\(\"dp\" -> SyntaxError: '\(' was never closed$"),
        ('    NamedSharding(mesh, P("tp"))', r"line 5: Named.* -> ValueError: Resource axis: tp"),
        ("    return 3", r"describe returned int; required: .* return step_fn, \(state, batch\)"),
        ("    return 1, 2, 3", r"describe returned tuple of 3; required"),
        (f"    return abs, {X}", r"its arguments as ShapeDtypeStruct; required: a tuple"),
        ('    return abs, (jax.ShapeDtypeStruct((8,), "float32"),)', r"no argument has a sharding"),
        (
            "    mesh = jax.make_mesh((2,), ('dp',), devices=jax.devices()[:2])\n"
            f"    return abs, ({X},)",
            r"argument \[0\] lies on 2 cpu, the mesh is of 8 cpu; make its sharding",
        ),
        (
            f"    return (lambda x: x @ x[:3]), ({X},)",
            r"line 5: return .* -> TypeError: dot_general",
        ),
        (
            f"    return (lambda: 0), ({X},)",
            r"not in a line of its own -> TypeError: .* takes 0",
        ),
    ],
    ids=[
        "raises",
        "exits",
        "syntax",
        "axis",
        "int",
        "three",
        "bare",
        "no-sharding",
        "other-devices",
        "trace",
        "arguments",
    ],
)
def test_mistakes_in_a_users_file_are_one_line(tmp_path, body, message):
    path = write(tmp_path, HEAD + body + "\n")
    with pytest.raises(ValueError, match=message) as error:
        audit.run(parse(f"--program={path}:describe"))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_function_that_is_not_there(tmp_path):
    path = write(tmp_path, EXAMPLE)
    with pytest.raises(ValueError, match=r"step\.py has no function step; it has describe\.$"):
        audit.run(parse(f"--program={path}:step"))


def test_a_file_may_import_what_lies_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text(EXAMPLE)
    path = write(tmp_path, "from beside_it import describe\n")
    before = list(sys.path)
    results = audit.run(parse(f"--program={path}:describe"))
    assert list(results["programs"]) == [f"{path}:describe"]
    assert sys.path == before


############################################ Mistakes ############################################


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--program=sed"], r"'sed' is none of seed, train and FILE\.py:function"),
        (["--program=/no/step.py:f"], r"there is no file /no/step\.py"),
        (["--topology=v3:2x2", "--gpu=H100"], r"give one of them"),
        (["--mesh=dp8"], r"'dp8' is not a new axis"),
        (["--d_model=0"], r"--d_model=0"),
        (["--comm_hook=int4"], r"'int4' is no hook"),
        (["--json=/nowhere/x.json"], r"there is no directory /nowhere"),
        (["--steps=3"], r"Unknown command line flag 'steps'"),
        (["seed"], r"'seed' is not a flag"),
    ],
    ids=lambda value: "-".join(value).replace("/", "_") if isinstance(value, list) else "",
)
def test_bad_flags_are_one_line(args, message):
    with pytest.raises(SystemExit, match=message) as exit_:
        parse(*args)
    assert "\n" not in exit_.value.code


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--microbatches=2"], r"--microbatches: not of --program=seed, whose own are --d_model"),
        (["--program=train", "--donate"], r"--donate: not of --program=train"),
        (["--axis_name=dp"], r"--axis_name: not of --program=seed"),
        (["--mesh=dp=4,mp=2"], r"has no model axis, the mesh has mp=2"),
        (
            ["--batch_size=100", "--grad_acc_steps=4"],
            r"--batch_size=100: .* 4 \* 8 = 32; the nearest that is: 96 or 128\.",
        ),
        (["--program=train", "--microbatches=3"], r"3 \* 8 = 24; the nearest that is: 48 or 72"),
        (["--program=train", "--mesh=x=8"], r"axes x, but this program splits the batch over dp"),
        (["--program=train", "--n_head=3"], r"d_model = 128 is not divisible by 2 \* n_head"),
        (["--program=train", "--sequence_parallel"], r"there is no axis mp"),
        (["--mesh=dp=16"], r"needs 16 devices, found 8 \(cpu\); --cpu_devices=16 simulates"),
        (["--topology=v9:2x2"], r"'v9:2x2' is not known to the installed libtpu"),
        (["--topology=v5e:2x4", "--mesh=dp=4"], r"has 8 devices, axes dp=4 take 4"),
        (["--gpu=X100"], r"kind is 'X100'\. Required: one of A100"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else "",
)
def test_what_does_not_fit_together_is_one_line(args, message):
    with pytest.raises(ValueError, match=message) as error:
        audit.run(parse(*args))
    assert "\n" not in str(error.value)


def test_an_unknown_data_axis(tmp_path):
    program = f"--program={write(tmp_path, EXAMPLE)}:describe"
    with pytest.raises(ValueError, match=r"the mesh has axes dp, and of these not y; name"):
        audit.run(parse(program, "--axis_name=y"))
    with pytest.raises(ValueError, match=r"the mesh has axes mp, and of these no data axis"):
        audit.run(parse(program, "--mesh=mp=8"))


############################################# Flags ##############################################


def test_help_is_complete(capsys):
    values = flags.FlagValues()
    audit_flags.define(values)
    grouped = [name for group in audit_flags.GROUPS.values() for name in group]
    assert sorted(grouped) == sorted(values)
    with pytest.raises(SystemExit) as exit_:
        parse("--help")
    assert exit_.value.code == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^  --(\w+)$", printed, re.M) == grouped
    assert "def describe(mesh):" in printed


def test_the_defaults_are_those_of_the_programs():
    trains = flags.FlagValues()
    train_flags.define(trains)
    ours = parse("--program=train")
    chosen = audit_flags.chosen(ours)
    for name in (*audit_flags.OF_BOTH, *audit_flags.OF_TRAIN):
        assert chosen[name] == trains[name].default
    assert audit_flags.chosen(parse())["d_model"] == 2048
