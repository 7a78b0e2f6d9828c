"""Replica groups in every notation, against the same grouping done by numpy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradaccum.audit._groups import axes_of, joined_axes, mesh_clause, parse_groups, shared_axes

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def listed(groups):
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


@st.composite
def meshes(draw):
    """A mesh (axis sizes by name) and some of its axes, in any order."""
    sizes = draw(SIZES)
    names = [f"a{i}" for i in range(len(sizes))]
    chosen = draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
    return dict(zip(names, sizes, strict=True)), chosen


def numpy_groups(mesh, axes, ids=None):
    """Devices of each group along `axes`, in the order of `axes`."""
    names = list(mesh)
    ids = np.arange(math.prod(mesh.values())) if ids is None else np.asarray(ids)
    table = ids.reshape(list(mesh.values()))
    order = [names.index(name) for name in names if name not in axes]
    order += [names.index(name) for name in axes]
    width = math.prod(mesh[name] for name in axes)
    return [[int(i) for i in row] for row in table.transpose(order).reshape(-1, width)]


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=5))
def test_lists_round_trip(groups):
    assert [list(group) for group in parse_groups(listed(groups))] == groups


@given(SIZES, st.data())
def test_iota_is_reshape_transpose_reshape(sizes, data):
    count = math.prod(sizes)
    order = data.draw(st.permutations(range(len(sizes))))
    width = data.draw(st.sampled_from([d for d in range(1, count + 1) if count % d == 0]))
    want = np.arange(count).reshape(sizes).transpose(order).reshape(-1, width)
    dims = ",".join(map(str, sizes))
    text = f"[{count // width},{width}]<=[{dims}]T({','.join(map(str, order))})"
    assert np.array_equal(parse_groups(text), want)
    plain = parse_groups(f"[{count // width},{width}]<=[{count}]")
    assert np.array_equal(plain, np.arange(count).reshape(-1, width))


@given(meshes())
def test_the_mesh_notation_groups_its_axes_in_order(case):
    mesh, axes = case
    inside = ",".join(f"'{name}'={size}" for name, size in mesh.items())
    text = f"mesh[{inside}] {{{','.join(repr(name) for name in axes)}}}"
    assert mesh_clause(text) == mesh
    assert [list(group) for group in parse_groups(text)] == numpy_groups(mesh, axes)


@given(meshes(), st.randoms(use_true_random=False))
def test_the_mesh_notation_with_device_ids(case, random):
    mesh, axes = case
    inside = ",".join(f"'{name}'={size}" for name, size in mesh.items())
    group = ",".join(repr(name) for name in axes)
    sizes = list(mesh.values())
    order = random.sample(range(len(sizes)), len(sizes))
    dims = [sizes[at] for at in np.argsort(order)]
    ids = np.arange(math.prod(sizes)).reshape(dims).transpose(order).reshape(-1)
    device_ids = f"([{','.join(map(str, dims))}]T({','.join(map(str, order))}))"
    text = f"mesh[{inside}], device_ids={device_ids} {{{group}}}"
    assert [list(g) for g in parse_groups(text)] == numpy_groups(mesh, axes, ids)
    random.shuffle(ids)
    text = f"mesh[{inside}], device_ids=({','.join(map(str, ids))}) {{{group}}}"
    assert [list(g) for g in parse_groups(text)] == numpy_groups(mesh, axes, ids)


@given(st.lists(st.integers(1, 3), min_size=3, max_size=3), st.integers(1, 3))
def test_a_part_of_an_axis_is_an_axis_of_the_split_mesh(factors, other):
    before, size, after = factors
    whole = {"a": before * size * after, "b": other}
    split = {"a1": before, "a2": size, "a3": after, "b": other}
    text = f"mesh['a'={whole['a']},'b'={other}] {{'a':({before}){size},'b'}}"
    assert [list(g) for g in parse_groups(text)] == numpy_groups(split, ["a2", "b"])


@given(meshes(), st.data())
def test_every_notation_names_the_same_axes(case, data):
    mesh, axes = case
    moving = tuple(name for name in mesh if name in axes and mesh[name] > 1)
    groups = numpy_groups(mesh, axes)
    data.draw(st.randoms(use_true_random=False)).shuffle(groups)
    assert axes_of(parse_groups(listed(groups)), mesh) == moving


@given(meshes(), st.data())
def test_axes_shared_by_two_groupings(case, data):
    mesh, one = case
    other = data.draw(st.lists(st.sampled_from(list(mesh)), unique=True, min_size=1))
    shared = shared_axes(numpy_groups(mesh, one), numpy_groups(mesh, other), mesh)
    want = tuple(n for n in mesh if n in one and n in other and mesh[n] > 1)
    assert shared == want


@given(meshes(), st.data())
def test_axes_joined_by_several_groupings(case, data):
    mesh, one = case
    other = data.draw(st.lists(st.sampled_from(list(mesh)), unique=True, min_size=1))
    joined = joined_axes([numpy_groups(mesh, one), numpy_groups(mesh, other)], mesh)
    assert joined == tuple(n for n in mesh if n in one or n in other or mesh[n] == 1)


def test_pairs_of_a_permutation_name_the_axes_they_move_along():
    mesh = {"dp": 4, "mp": 2}
    assert axes_of(parse_groups("{{0,2},{2,4},{4,6},{6,0}}"), mesh) == ("dp",)
    assert axes_of(parse_groups("{{0,1},{1,0}}"), mesh) == ("mp",)
    assert axes_of(parse_groups("{{0,3}}"), mesh) == ("dp", "mp")
    assert axes_of(parse_groups("{{5,5}}"), mesh) == ()


def test_halves_of_an_axis_are_that_axis_but_do_not_join_it():
    mesh = {"dp": 8}
    halves, across = parse_groups("[2,4]<=[8]"), parse_groups("[4,2]<=[2,4]T(1,0)")
    assert axes_of(halves, mesh) == axes_of(across, mesh) == ("dp",)
    assert joined_axes([halves], mesh) == joined_axes([across], mesh) == ()
    assert joined_axes([halves, across], mesh) == ("dp",)
    assert shared_axes(halves, across, mesh) == ()
    assert shared_axes(halves, halves, mesh) == ("dp",)


def test_everyone_is_an_empty_list():
    assert parse_groups("{}") == ()


@pytest.mark.parametrize("text", ["[4,2]<=", "[x]<=[8]", "[4,2]<=[8]T"])
def test_a_notation_that_is_none_is_an_error(text):
    with pytest.raises(ValueError, match=r"audit: not an iota device list: '\["):
        parse_groups(text)


@pytest.mark.parametrize("text", ["mesh['a'=2,'b'=4]", "", "{{0,1},{2,x}}", "everyone"])
def test_what_is_no_notation_is_an_error_rather_than_everyone(text):
    with pytest.raises(ValueError, match=r"audit: not a notation of replica groups: "):
        parse_groups(text)
