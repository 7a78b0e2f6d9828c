"""Small runs of absl_apps.bench, for its tests."""

from absl import flags

from absl_apps import bench_flags

TINY = (
    "--grad_acc_steps=4",
    "--batch_size=64",
    "--d_model=32",
    "--n_layer=2",
    "--rounds=2",
)


def parse(*args):
    values = flags.FlagValues()
    bench_flags.parse(["bench", *args], values, manual="The manual.")
    return values
