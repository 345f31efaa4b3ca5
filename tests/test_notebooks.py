"""Every notebook is executed by the interpreter that runs the tests; what it computes must be what its text says."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jax
import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpecManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
TIMEOUT = 300  # seconds a cell; a whole notebook takes a minute or two where nothing else runs

# Of each notebook, the names of the variables that its test reads.
FACTS = {
    "01_differentiate_through_aggregation": (
        "chance", "final", "above_zero", "check", "errors", "ranking", "paths", "sweep", "grid", "tuned_gain",
    ),
}  # fmt: skip
SEND = """
import json
import jax
import numpy as np
plain_types = lambda value: (
    {str(k): plain_types(v) for k, v in value.items()} if isinstance(value, dict)
    else [plain_types(v) for v in value] if isinstance(value, (list, tuple)) else np.asarray(value).tolist()
)
print("FACTS" + json.dumps({name: plain_types(globals()[name]) for name in %r}))
"""


def execute(notebook: Path, folder: Path) -> dict[str, Any]:
    """Run a notebook in an empty folder; the values of its ``FACTS``. A cell that fails raises its own error."""
    content = nbformat.read(notebook, as_version=4)
    content.cells.append(nbformat.v4.new_code_cell(SEND % (FACTS.get(notebook.stem, ()),)))
    spec = {"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "tests",
            "language": "python"}  # fmt: skip
    kernels = folder / "kernels"
    (kernels / "tests").mkdir(parents=True)
    (kernels / "tests" / "kernel.json").write_text(json.dumps(spec))
    work = folder / "work"
    work.mkdir()
    manager = AsyncKernelManager(kernel_name="tests", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(kernels)]))
    client = NotebookClient(content, km=manager, timeout=TIMEOUT, resources={"metadata": {"path": str(work)}})
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    own = {"PYTHONPATH": paths, "IPYTHONDIR": str(folder / "ipython")}
    if jax.config.jax_compilation_cache_dir:  # what an earlier run of the tests compiled (see conftest)
        own["JAX_COMPILATION_CACHE_DIR"] = os.path.abspath(jax.config.jax_compilation_cache_dir)
        own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    client.execute(env=os.environ | own)
    assert not list(work.iterdir()), "a notebook leaves no files"
    (printed,) = [out.text for out in content.cells[-1].outputs if out.get("name") == "stdout"]
    return json.loads(printed.removeprefix("FACTS"))


every_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


@every_notebook
def test_runs_and_computes_what_its_text_says(notebook: Path, tmp_path: Path) -> None:
    facts = execute(notebook, tmp_path)
    CHECKS.get(notebook.stem, lambda facts: None)(facts)


def differentiate_through_aggregation(facts: dict[str, Any]) -> None:
    final, above_zero, chance = facts["final"], facts["above_zero"], facts["chance"]
    # Section 2: who learns which weights.
    assert final["FedAPA"]["to own group"] > 2 * chance
    assert final["FedAPA, row"]["to own group"] > max(0.9, final["FedAPA"]["to own group"])
    assert final["FedAPA, as printed"]["to own group"] < 0.5 * chance
    assert final["FedAPA, cosine"]["self"] > 0.8
    assert final["FedAPA, cosine"]["to own group"] > 0.9
    accuracy = {name: values["accuracy"] for name, values in final.items()}
    assert accuracy["own group (truth)"] > accuracy["nobody helps"] + 0.03
    assert accuracy["FedAPA, row"] > accuracy["nobody helps"] + 0.03
    assert above_zero["none"] > 0.5 > above_zero["row"] > above_zero["cosine"]
    # Sections 3 and 4: gradients.
    assert all(difference < 1e-8 for difference in facts["check"].values()), facts["check"]
    assert len(facts["errors"]) == 8
    assert all(error < 1e-5 for error in facts["errors"].values()), facts["errors"]
    assert min(facts["ranking"].values()) > 0.6
    # Section 5: the descent reaches the bottom of the sweep.
    for centring, (eta, loss) in facts["paths"].items():
        assert loss[-1] < loss[0] - 0.05
        assert loss[-1] < min(facts["sweep"][centring]) + 0.003
        assert 0.3 < eta[-1] / facts["grid"][facts["sweep"][centring].index(min(facts["sweep"][centring]))] < 3
    soon, later = zip(*(facts["tuned_gain"][name] for name in ("FedAPA", "FedAPA, row")), strict=True)
    assert min(soon) > 0.02
    assert later[0] < 0.005, "the text says that without centring the gain does not last"
    assert later[0] < later[1] < soon[1]


CHECKS = {"01_differentiate_through_aggregation": differentiate_through_aggregation}


@every_notebook
def test_is_stored_clean_and_with_its_output(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    assert notebook.stat().st_size < 1_000_000
    assert content.metadata.kernelspec.name == "python3"
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run it from the top, then save"
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    text = "".join(cell.source for cell in content.cells) + "".join(output.get("text", "") for output in outputs)
    assert not re.search(r"/(home|Users|tmp|work|root)/", text), "no absolute paths"
