"""What the compiler must know of a GPU that is not here: XLA's GpuTargetConfigProto, as text."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """The figures in which the supported GPUs differ; sizes in bytes, rates in a second."""

    description: str  # as the driver names it; JAX's device_kind
    capability: int  # major version of its compute capability
    cores: int  # streaming multiprocessors
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    memory: int
    memory_bandwidth: int
    l2_cache: int
    clock_ghz: float


# SXM variants of 8-GPU servers. The data sheets give memory, bandwidth, cores and clock; the
# CUDA programming guide, by compute capability, shared memory and the FPUs of a core.
GPUS = {
    "A100": Gpu(
        description="NVIDIA A100-SXM4-80GB",
        capability=8,
        cores=108,
        fpus_per_core=64,
        shared_memory_per_core=167_936,
        shared_memory_per_block_optin=166_912,
        memory=85_100_068_864,
        memory_bandwidth=2_039_040_000_000,
        l2_cache=41_943_040,
        clock_ghz=1.41,
    ),
    "H100": Gpu(
        description="NVIDIA H100 80GB HBM3",
        capability=9,
        cores=132,
        fpus_per_core=128,
        shared_memory_per_core=233_472,
        shared_memory_per_block_optin=232_448,
        memory=84_942_979_072,
        memory_bandwidth=3_352_320_000_000,
        l2_cache=52_428_800,
        clock_ghz=1.98,
    ),
    "H200": Gpu(
        description="NVIDIA H200",
        capability=9,
        cores=132,
        fpus_per_core=128,
        shared_memory_per_core=233_472,
        shared_memory_per_block_optin=232_448,
        memory=151_397_597_184,
        memory_bandwidth=4_800_000_000_000,
        l2_cache=52_428_800,
        clock_ghz=1.98,
    ),
    "B200": Gpu(
        description="NVIDIA B200",
        capability=10,
        cores=148,
        fpus_per_core=128,
        shared_memory_per_core=233_472,
        shared_memory_per_block_optin=232_448,
        memory=191_514_411_008,
        memory_bandwidth=7_672_320_000_000,
        l2_cache=132_644_864,
        clock_ghz=1.965,
    ),
}


def target_config(gpu: Gpu) -> str:
    """Return the GpuTargetConfigProto of a GPU in protobuf's text format."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.memory_bandwidth}
  l2_cache_size: {gpu.l2_cache}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_optin}
  cuda_compute_capability {{ major: {gpu.capability} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 8 }}
dnn_version_info {{ major: 9 minor: 7 }}
device_description_str: "{gpu.description}"
"""
