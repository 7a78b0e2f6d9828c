"""Flag-driven programs: train, bench, audit, plan and the tensor-parallel comparison."""

from absl_apps.quiet import without_remarks

# Whoever runs a program for GPUs that are not here is not told by every line that they are not.
with without_remarks():
    import jax as jax
