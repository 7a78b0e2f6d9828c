"""Installs gradaccum; the extras are described in README.md."""

from __future__ import annotations

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "gradaccum/__init__.py").read_text())[1]

APPS = [
    "dm-haiku>=0.0.16",
    "grain>=0.2.18",
    "matplotlib>=3.9",
    "orbax-checkpoint>=0.12",
    "tensorboardX>=2.6",
    "tqdm>=4.60",
]
AOT_TPU = ["libtpu"]
AOT_GPU = ["jax-cuda12-plugin", "jax-cuda12-pjrt"]  # of jaxlib's version; no NVIDIA library
TEST = [
    *APPS,
    *AOT_TPU,
    *AOT_GPU,
    "pytest>=8",
    "pytest-xdist>=3.5",
    "hypothesis>=6.100",
    "flax>=0.12",
    "equinox>=0.13",
]

setup(
    name="gradaccum",
    version=VERSION,
    description="Gradient accumulation for JAX and optax with exactly one cross-device mean a step",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    python_requires=">=3.11",
    packages=find_packages(include=["gradaccum", "gradaccum.*", "absl_apps", "absl_apps.*"]),
    package_data={"gradaccum": ["py.typed", "CHANGELOG.md"]},
    # The core's tests have run on jax 0.10.0 and 0.10.2 with Python 3.11, on 0.12.0.1 with 3.13;
    # numpy 2.4.6 and 2.5.5, optax 0.2.8, chex 0.1.92. Before 0.10.0 no backward pass takes refs.
    install_requires=[
        "jax>=0.10.0",
        "jaxlib>=0.10.0",
        "numpy>=2.0",
        "optax>=0.2.8",
        "chex>=0.1.91",
        "absl-py>=2.1",
    ],
    extras_require={
        "apps": APPS,
        "aot-tpu": AOT_TPU,
        "aot-gpu": AOT_GPU,
        "test": TEST,
        "dev": [*TEST, "ruff>=0.12", "mypy>=1.17"],
    },
)
