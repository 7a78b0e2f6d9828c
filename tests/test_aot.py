"""Meshes of devices that are not here: which, in what order, and every mistake in one line."""

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from gradaccum import aot, audit
from gradaccum.aot._gpu_targets import GPUS


def doubled(mesh, shape=(64, 8)):
    """The compiled sum over the first axis of an array that lies on all axes."""
    x = jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(mesh, P(mesh.axis_names)))
    return jax.jit(lambda x: 2 * x.sum(0)).lower(x).compile()


############################################## TPUs ##############################################


@pytest.mark.parametrize(
    ("topology", "kind", "devices"),
    [
        ("v2:2x2", "TPU v2", 8),  # two devices a chip
        ("v3:2x2", "TPU v3", 8),
        ("v4:2x2x1", "TPU v4", 4),  # one, as where it runs
        ("v5e:2x4", "TPU v5 lite", 8),
        ("v5p:2x2x1", "TPU v5", 4),
        ("v6e:2x4", "TPU v6 lite", 8),
        ("tpu7x:2x2x1", "TPU7x", 8),
    ],
)
def test_a_slice_of_every_chip(topology, kind, devices):
    mesh = aot.tpu_mesh(topology, {"dp": devices})
    assert {device.device_kind for device in mesh.devices.flat} == {kind}
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,)
    # The compiler says what it has, when asked for too much.
    device = mesh.devices.flat[0]
    sharding = SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((10**11,), "float32", sharding=sharding)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as error:
        jax.jit(lambda x: 2 * x).lower(x).compile()
    (gib,) = re.findall(r"available HBM \(([\d.]+)G\)|of ([\d.]+)G hbm", str(error.value))
    assert aot.memory_limit(device) == int(float("".join(gib)) * 2**30)


def test_programs_for_a_slice_are_audited():
    mesh = aot.tpu_mesh("v5e:2x4", {"dp": 4, "mp": 2})
    rows = audit.collectives(doubled(mesh), mesh=mesh)
    assert [(row.kind, row.axes) for row in rows] == [("all-reduce", ("dp", "mp"))]


@pytest.mark.parametrize(
    ("axes", "slices"),
    [
        ({"replica": 2, "dp": 8}, 2),
        ({"dp": 16}, 2),
        ({"dp": 4, "mp": 4}, 2),
        ({"replica": 2, "dp": 8, "mp": 2}, 4),  # two slices along each of the first two
    ],
    ids=str,
)
def test_slices_lie_along_the_first_axes(axes, slices):
    mesh = aot.tpu_mesh("v5e:2x4", axes, num_slices=slices)
    assert dict(mesh.shape) == axes
    numbers = [device.slice_index for device in mesh.devices.flat]
    assert numbers == [i // 8 for i in range(8 * slices)]


def test_what_crosses_slices_is_the_outer_axis():
    mesh = aot.tpu_mesh("v5e:2x2", {"replica": 2, "dp": 4}, num_slices=2)
    rows = audit.collectives(doubled(mesh, (64, 1024)), mesh=mesh)
    assert {row.axes for row in rows if row.kind == "send"} == {("replica",)}


@pytest.mark.parametrize("axes", [{"dp": 512, "mp": 2}, {"a": 32, "b": 32}], ids=str)
def test_axes_that_split_a_dimension_of_the_torus(axes):
    assert dict(aot.tpu_mesh("v5p:8x8x16", axes).shape) == axes


@pytest.mark.parametrize(
    ("topology", "axes", "options", "message"),
    [
        (
            "v9:2x2",
            {"dp": 8},
            {},
            r"^aot\.tpu_mesh: topology 'v9:2x2' is not known .*v9\)\. Required: .*of chips "
            r"v2:2x2, v3:2x2, v4:2x2x1, v5e:2x4, v5p:2x2x1, v6e:2x4, tpu7x:2x2x1\.$",
        ),
        ("v5e", {"dp": 8}, {}, r"'v5e' is not known .*not written CHIP:SIZExSIZE"),
        ("", {"dp": 8}, {}, r"'' is not known .*not written CHIP:SIZExSIZE"),
        ("v5e:0x4", {"dp": 8}, {}, r"'v5e:0x4' is not known .*sizes of at least 1"),
        ("v5e:3x3", {"dp": 9}, {}, r"'v5e:3x3' is not known .*not divisible"),
        ("v3:2x2", {"dp": 4}, {}, r"v3:2x2 has 8 devices, axes dp=4 take 4\. Required: all"),
        ("v5e:2x4", {"a": 3, "b": 3}, {}, r"has 8 devices, axes a=3 \* b=3 = 9 take 9"),
        ("v5e:2x4", {"dp": 8}, {"num_slices": 2}, r"2 slices of v5e:2x4 has 16 devices"),
        ("v5e:2x4", {"dp": 8}, {"num_slices": 0}, r"num_slices is 0\. Required: an int of at"),
        (
            "v5e:2x4",
            {"mp": 4, "dp": 12},
            {"num_slices": 6},
            r"^aot\.tpu_mesh: axes mp=4 \* dp=12 = 48 cannot be laid over 6 slices of 8 dev"
            r"ices\. .* divides 6 or",
        ),
        ("v5e:2x4", {"dp": 0}, {}, r"axes is \{'dp': 0\}\. Required: at least one axis"),
        ("v5e:2x4", {"dp": True}, {}, r"axes is \{'dp': True\}"),
        ("v5e:2x4", {}, {}, r"axes is \{\}"),
    ],
)
def test_tpu_mistakes_are_one_line(topology, axes, options, message):
    with pytest.raises(ValueError, match=message) as error:
        aot.tpu_mesh(topology, axes, **options)
    assert "\n" not in str(error.value)


def test_axes_are_a_mapping():
    for make in (aot.tpu_mesh, aot.gpu_mesh):
        with pytest.raises(TypeError, match=r"axes is 'dp=8', a str\. Required: a mapping"):
            make("v5e:2x4", "dp=8")


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    with pytest.raises(ValueError, match=r"not installed.* pip install 'gradaccum\[aot-tpu\]'"):
        aot.tpu_mesh("v3:2x2", {"dp": 8})


############################################## GPUs ##############################################


@pytest.mark.parametrize("kind", GPUS)
def test_every_gpu_compiles(kind):
    mesh = aot.gpu_mesh(kind, {"dp": 16}, hosts=2)
    assert [device.process_index for device in mesh.devices.flat] == [0] * 8 + [1] * 8
    assert kind in mesh.devices.flat[0].device_kind
    (row,) = audit.collectives(doubled(mesh), mesh=mesh)
    assert (row.kind, row.axes, row.group_size) == ("all-reduce", ("dp",), 16)
    gib = {"A100": 80, "H100": 80, "H200": 141, "B200": 180}[kind]
    assert 0.7 * gib < aot.memory_limit(mesh.devices.flat[0]) / 2**30 < 0.76 * gib


def test_a_thousand_gpus():
    mesh = aot.gpu_mesh("H100", {"dp": 128, "mp": 8}, hosts=128)
    hosts = [device.process_index for device in mesh.devices[:, 0]]
    assert hosts == list(range(128))  # the model axis stays within one


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            "V100",
            {},
            r"^aot\.gpu_mesh: kind is 'V100'\. Required: one of A100, H100, H200, B200\.$",
        ),
        ("H100", {"hosts": 3}, r"axes dp=8 do not divide evenly over hosts=3\. .* the 8 GPUs\.$"),
        ("H100", {"hosts": 0}, r"hosts=0"),
        (["H100"], {}, r"kind is \['H100'\]\. Required: one of A100"),
    ],
)
def test_gpu_mistakes_are_one_line(kind, options, message):
    with pytest.raises(ValueError, match=message):
        aot.gpu_mesh(kind, {"dp": 8}, **options)


def test_without_the_plugin_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda12", None)
    monkeypatch.setitem(sys.modules, "jax_plugins.xla_cuda13", None)
    with pytest.raises(ValueError, match=r"not installed.* pip install 'gradaccum\[aot-gpu\]'"):
        aot.gpu_mesh("H100", {"dp": 8})


def test_a_plugin_of_another_version_is_named(monkeypatch):
    real = importlib.metadata.version
    other = {"jax-cuda12-plugin": "0.1.0", "jax-cuda13-plugin": "0.1.0"}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: other.get(name) or real(name))
    jaxlib = re.escape(real("jaxlib"))
    with pytest.raises(ValueError, match=rf"is 0\.1\.0, jaxlib is {jaxlib}.*-pjrt=={jaxlib}\.$"):
        aot.gpu_mesh("H100", {"dp": 8})


########################################### Both at once #########################################

SCRIPT = """
import os, sys
import jax
before = dict(os.environ)
if sys.argv[1] == "query first":  # then JAX has found no NVIDIA library, and left the plugin out
    assert jax.devices()[0].platform == "cpu"
print("from here on", file=sys.stderr, flush=True)
from jax.sharding import NamedSharding, PartitionSpec
from gradaccum import aot
for mesh in (aot.gpu_mesh("H100", {"dp": 8}), aot.tpu_mesh("v5e:2x4", {"dp": 8})):
    where = NamedSharding(mesh, PartitionSpec("dp"))
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=where)
    plan = aot.plan_microbatches(lambda k: lambda x: k * x, x, candidates=[2])
    print(plan.peak_bytes > 0)
assert dict(os.environ) == before
"""


@pytest.mark.slow
@pytest.mark.parametrize("order", ["query first", "query never"])
def test_no_accelerator_and_no_word_on_stderr(order):
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "TPU"))}
    environment["PYTHONPATH"] = str(pathlib.Path(aot.__file__).parents[2])
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, order],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "True\nTrue\n"
    assert result.stderr.partition("from here on\n")[2] == ""


######################################## The devices here ########################################


def test_devices_that_are_here():
    mesh = aot.make_mesh({"dp": 4, "mp": 2}, jax.devices())
    assert list(mesh.devices.flat) == jax.devices()
    assert aot.memory_limit(mesh.devices.flat[0]) is None
    with pytest.raises(TypeError, match=r"got an object of type Mesh\. Required: a device\."):
        aot.memory_limit(mesh)
    with pytest.raises(
        ValueError, match=r"axes dp=4 do not take the 8 devices given\. Required: a"
    ):
        aot.make_mesh({"dp": 4}, jax.devices())


def test_the_peak_counts_a_donated_argument_once():
    x = jax.ShapeDtypeStruct((1000,), "float32")
    for donated, size in (((), 8000), (0, 4000)):
        step = jax.jit(lambda x: x + 1, donate_argnums=donated)
        assert aot.peak_bytes(step.lower(x).compile()) == size
    with pytest.raises(TypeError, match=r"got an object of type Lowered\. Required: a jax\.st"):
        aot.peak_bytes(step.lower(x))
