"""Tests run on eight simulated devices; most use the first only. Double precision is a fixture."""

import gc
import importlib.metadata
import os

flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    flags = f"{flags} --xla_force_host_platform_device_count=8"
if importlib.metadata.version("jax").startswith("0.10."):  # unknown flags abort the process
    # Four times less compiling; the tests' programs are far too small to miss the optimisations.
    flags = f"{flags} --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = flags.strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # scikit-learn's threads would wait for those of the other workers

import jax
import pytest

# Programs that several tests (or an earlier run) compile alike are compiled once.
if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
    jax.config.update(
        "jax_compilation_cache_dir", os.path.join(os.path.dirname(__file__), "..", ".pytest_cache", "xla")
    )
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture
def float64():
    """Double precision inside the test."""
    with jax.enable_x64(True):
        yield


MAPS = "/proc/self/maps"
MOST = 25_000  # of the 65,530 memory maps that Linux gives a process by default; some thousand programs need more


@pytest.fixture(autouse=True)
def few_programs():
    """Forget compiled programs before they use up the memory maps of the process, which ends it with a crash."""
    yield
    if os.path.exists(MAPS):
        with open(MAPS, "rb") as maps:
            count = sum(1 for _ in maps)
        if count > MOST:
            jax.clear_caches()
            gc.collect()
