"""What programs of several processes, and several programs of one process, got wrong elsewhere."""

import importlib
import pkgutil

import jax
import pytest
from absl import flags

import absl_apps
from absl_apps import (
    audit_flags,
    bench_flags,
    cluster,
    plan,
    tensor_parallel_flags,
    train,
    train_flags,
)

MODULES = [f"absl_apps.{module.name}" for module in pkgutil.iter_modules(absl_apps.__path__)]
PROGRAMS = (audit_flags, bench_flags, plan, tensor_parallel_flags, train_flags)
QUERIES = ("devices", "local_devices", "device_count", "process_count", "process_index")


def parsed(*args):
    values = flags.FlagValues()
    train_flags.parse(["train", *args], values, manual="")
    return values


JOINED = ("--multihost", "--coordinator_address=127.0.0.1:9", "--num_processes=1", "--process_id=0")


def test_a1_processes_join_before_the_first_device_query(monkeypatch):
    seen = []

    def remember(module, name, what, call=None):
        def recorded(*args, **given):
            seen.append(what)
            return call(*args, **given) if call else None

        monkeypatch.setattr(module, name, recorded)

    for name in QUERIES:
        remember(jax, name, "query", getattr(jax, name))
    remember(jax.distributed, "initialize", "join")
    remember(cluster, "_check_port", "port")
    remember(train, "train", "train")
    monkeypatch.setattr(flags, "FLAGS", parsed(*JOINED))
    before = jax.config.jax_enable_preemption_service
    try:
        train.main(["train"])
    finally:
        jax.config.update("jax_enable_preemption_service", before)
    assert seen[:3] == ["port", "join", "query"]
    assert seen[-1] == "train"


def test_a1_a_query_before_it_is_one_line(monkeypatch):
    """As in this process, whose devices were asked for long ago."""
    assert jax.device_count() == 8
    monkeypatch.setattr(cluster, "_check_port", lambda address: None)
    before = jax.config.jax_enable_preemption_service
    with pytest.raises(SystemExit, match=r"^train: --multihost: .*initialize.* before ") as exit_:
        cluster.join("train", parsed(*JOINED), notices=before)
    assert "\n" not in exit_.value.code


def test_a3_an_import_reads_and_defines_no_flag():
    """None is defined before a program starts, so that a read at import would raise."""
    for name in MODULES:
        importlib.import_module(name)
    assert not [module for module in flags.FLAGS.flags_by_module_dict() if "absl_apps" in module]
    with pytest.raises((AttributeError, flags.Error)):
        flags.FLAGS.d_model  # noqa: B018


def test_a4_programs_share_names_of_flags_in_one_process():
    own = {}
    for program in PROGRAMS:
        own[program.__name__] = flags.FlagValues()
        program.define(own[program.__name__])
    users = [name for name, values in own.items() if "d_model" in values]
    assert len(users) >= 3
    with pytest.raises(flags.DuplicateFlagError, match="defined twice"):  # in the flags of all
        bench_flags.define(own[train_flags.__name__])
