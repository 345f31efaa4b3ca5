"""The README's Python blocks run, in order, in one namespace; its commands name real options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedjax_pfl as fp

README = (Path(__file__).parent.parent / "README.md").read_text("utf-8")


def test_python_blocks_run() -> None:
    namespace: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["result"].records[-1].round == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(fp.registry()))
def test_every_method_is_listed(name: str) -> None:
    assert f"| `{name}` |" in README
