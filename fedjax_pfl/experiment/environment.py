"""Where a run was made: versions, platform, devices, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def environment() -> dict[str, Any]:
    """The content of ``environment.json``."""
    from fedjax_pfl import __version__

    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "fedjax_pfl": __version__,
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "backend": jax.default_backend(),
        "device_kind": devices[0].device_kind,
        "device_count": len(devices),
        "x64": float64(),
        "git_commit": commit(),
    }


def float64() -> bool:
    """Whether JAX computes in double precision."""
    return jnp.result_type(float) == jnp.float64


def commit() -> str | None:
    """The commit of the checkout that the package is in; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
