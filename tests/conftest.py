"""Eight CPU devices and strict rank promotion for every test; a missing device fails."""

import gc
import os

import helpers
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_sessionstart(session):
    del session
    given = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{given or ''} {helpers.XLA_FLAGS}".strip()
    assert jax.device_count() == 8, f"the tests need 8 CPU devices, found {jax.devices()}"
    jax.jit(lambda: 0).lower().compile()
    # Read by now. libtpu, which reads them at its own first compilation, aborts at unknown ones.
    del os.environ["XLA_FLAGS"]
    if given is not None:
        os.environ["XLA_FLAGS"] = given
    # Tracing makes many objects and few cycles: looking for them took a twentieth of the time.
    gc.freeze()
    gc.set_threshold(200_000, 20, 20)
