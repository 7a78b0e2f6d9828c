"""Gradient accumulation for JAX and optax with exactly one cross-device mean per step."""

__version__ = "0.1.0"
