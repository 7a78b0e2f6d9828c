"""Eight CPU devices and strict rank promotion for every test; a missing device fails."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_sessionstart(session):
    del session
    assert jax.device_count() == 8, f"the tests need 8 CPU devices, found {jax.devices()}"
