"""Eight CPU devices and strict rank promotion for every test; a missing device fails."""

import os

import jax

# What a program costs to compile matters here, not what it costs to run: this halves the suite's
# time. jax 0.12 has only the emitters that are faster to run, and aborts at the second flag.
if jax.__version_info__ < (0, 11):
    fast = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", fast)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_sessionstart(session):
    del session
    assert jax.device_count() == 8, f"the tests need 8 CPU devices, found {jax.devices()}"
