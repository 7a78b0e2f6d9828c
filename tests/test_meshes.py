"""The program's devices: `--mesh` text, meshes, and a platform chosen before any device query."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from absl_apps import meshes
from gradaccum import aot


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("dp=8", {"dp": 8}),
        ("replica=2,dp=4", {"replica": 2, "dp": 4}),
        ("dp=4,mp=2", {"dp": 4, "mp": 2}),
        ("a=1, b_2=3", {"a": 1, "b_2": 3}),
    ],
)
def test_parse(text, axes):
    parsed = meshes.parse(text)
    assert list(parsed.items()) == list(axes.items())


@pytest.mark.parametrize("text", ["", "dp", "dp=", "=8", "dp=0", "dp=-1", "dp=2,dp=4", "8", "dp=x"])
def test_bad_text_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"is not a new axis .*write for example --mesh=dp=8"):
        meshes.parse(text)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_mesh_may_use_some_of_the_devices(size):
    mesh = meshes.make({"dp": size}, f"--dp={size}")
    assert dict(mesh.shape) == {"dp": size}
    assert set(mesh.devices.flat) == set(jax.devices()[:size])
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,)


@pytest.fixture
def two_slices(monkeypatch):
    """Two slices of eight chips, which JAX might number in any order."""
    found = list(aot.tpu_mesh("v5e:2x4", {"dp": 16}, num_slices=2).devices.flat)
    monkeypatch.setattr(meshes.jax, "devices", lambda: found[::2] + found[1::2])


@pytest.mark.parametrize("axes", [{"dp": 16}, {"replica": 2, "dp": 8}, {"dp": 4, "mp": 4}], ids=str)
def test_slices_lie_along_the_first_axis(two_slices, axes):
    del two_slices
    where = [device.slice_index for device in meshes.make(axes, "").devices.flat]
    assert where == [0] * 8 + [1] * 8


def test_an_axis_that_does_not_divide_between_slices_is_refused(two_slices):
    del two_slices
    with pytest.raises(ValueError, match=r"replica=1 \* dp=3 \* mp=4 = 12 .*slices"):
        meshes.make({"replica": 1, "dp": 3, "mp": 4}, "")


@pytest.mark.parametrize(
    ("axes", "asked", "simulate", "message"),
    [
        ({"dp": 16}, "--dp=16", None, r"^--dp=16: needs 16 devices, found 8 .*; use 8 or fewer\."),
        ({"r": 3, "d": 4}, "--mesh=r=3,d=4", "--cpus", r"3 \* 4 = 12 .* \(cpu\); --cpus=12 simul"),
    ],
    ids=["one-axis", "two-axes"],
)
def test_too_large_a_mesh_is_refused_with_the_numbers(axes, asked, simulate, message):
    with pytest.raises(ValueError, match=message):
        meshes.make(axes, asked, simulate)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((16, 64, 64), P("dp")),
        ((6, 64, 512), P(None, "dp")),  # the first that divides, not the largest
        ((6, 6, 512), P(None, None, "dp")),
        ((8, 127), P()),  # under 1,024 elements
        ((8, 128), P("dp")),
        ((4096 + 2,), P()),  # nothing divides
        ((0, 2048), P()),
        ((), P()),
    ],
    ids=str,
)
@pytest.mark.parametrize("axes", [{"dp": 4}, {"replica": 2, "dp": 4}], ids=["one", "two-axes"])
def test_arrays_are_split_by_one_rule(shape, spec, axes):
    assert meshes.split_spec(shape, meshes.make(axes, "")) == spec


@pytest.mark.parametrize(
    ("shape", "model", "spec"),
    [
        ((4, 64, 192), P(None, None, "mp"), P("dp", None, "mp")),  # another dimension than mp's
        ((6, 64, 192), P(None, None, "mp"), P(None, "dp", "mp")),
        ((6, 64, 62), P(None, "mp"), P(None, ("mp", "dp"))),  # the same, behind it
        ((256, 64), P("mp"), P(("mp", "dp"))),
        ((6, 6, 512), P(None, "mp"), P(None, "mp", "dp")),
        ((4, 64), P(), P()),
        ((32, 64), P(None, "mp"), P("dp", "mp")),  # 1,024 elements of each device's shard
        ((32, 62), P(None, "mp"), P(None, "mp")),  # and fewer
        ((2, 6, 514), P(None, None, "mp"), P(None, None, "mp")),  # 257 is not divisible
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "axes", [{"dp": 4, "mp": 2}, {"replica": 1, "dp": 4, "mp": 2}], ids=["one", "two-axes"]
)
def test_a_shard_of_a_model_axis_is_split_by_the_same_rule(shape, model, spec, axes):
    mesh = meshes.make(axes, "")
    assert meshes.split_spec(shape, mesh, model) == spec
    assert jax.sharding.NamedSharding(mesh, spec).shard_shape(shape)  # it divides


def test_one_process_holds_all_rows():
    for axes in ({"dp": 8}, {"dp": 4, "mp": 2}, {"dp": 1, "mp": 4}):
        mesh = meshes.make(axes, "")
        split = jax.sharding.NamedSharding(mesh, P(meshes.data_axes(mesh)))
        assert meshes.local_rows(split, 16).tolist() == list(range(16))  # others: test_multihost


def test_data_axes_are_all_but_the_model_axis():
    for axes in ({"dp": 8}, {"replica": 2, "dp": 2, "mp": 2}, {"dp": 1, "mp": 4}):
        assert meshes.data_axes(meshes.make(axes, "")) == tuple(a for a in axes if a != "mp")


@pytest.fixture
def config(monkeypatch):
    """A stand-in for jax.config, as in a fresh process; the real one is settled by now."""

    class Config:
        jax_platforms = None
        jax_num_cpu_devices = -1

        def update(self, name, value):
            setattr(self, name, value)

    monkeypatch.setattr(meshes.jax, "config", Config())
    monkeypatch.setattr(meshes, "_accelerator_possible", lambda: False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return meshes.jax.config


def test_without_accelerators_the_platform_is_the_cpu(config):
    meshes.prepare_platform(8)
    assert (config.jax_platforms, config.jax_num_cpu_devices) == ("cpu", 8)


def test_accelerators_are_left_to_jax(config, monkeypatch):
    monkeypatch.setattr(meshes, "_accelerator_possible", lambda: True)
    meshes.prepare_platform(8)
    assert config.jax_platforms is None


def test_choices_already_made_are_kept(config, monkeypatch):
    config.jax_platforms, config.jax_num_cpu_devices = "cuda", 4
    meshes.prepare_platform(8)
    assert (config.jax_platforms, config.jax_num_cpu_devices) == ("cuda", 4)
    config.jax_num_cpu_devices = -1
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    meshes.prepare_platform(8)
    assert config.jax_num_cpu_devices == -1
