"""The package alone loads what it needs and nothing else."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"tensorflow", "tensorflow_datasets", "orbax", "matplotlib", "sklearn", "scipy", "tyro", "jraph", "rich"}


def test_import_loads_no_heavy_package() -> None:
    """Packages that Flax itself loads do not count: what the import adds to ``import jax, flax.linen, optax, chex``."""
    code = (
        "import sys, jax, flax, flax.linen, optax, chex, numpy; before = set(sys.modules); import fedjax_pfl; "
        "print(' '.join(sorted({name.split('.')[0] for name in set(sys.modules) - before})))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(out) & HEAVY, out
    outside = [name for name in out if name not in sys.stdlib_module_names and not name.startswith("_")]
    assert set(outside) <= {"fedjax_pfl", "jax", "jaxlib", "flax", "optax", "chex", "numpy"}, outside
