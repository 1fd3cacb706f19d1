"""The programs of the docs."""

from __future__ import annotations

import re
import runpy

from worlds import ROOT, forget_bitsandbytes


def program(name: str, *expected: str) -> tuple:
    """Run a program of the current folder; return these variables at its end."""
    forget_bitsandbytes()
    left = runpy.run_path(name, run_name="__main__")
    return tuple(left[one] for one in expected)


def blocks(page: str, kind: str) -> dict[str, str]:
    """Return the code blocks of a page, by the name in their first line."""
    text = (ROOT / "docs" / page).read_text()
    return dict(re.findall(rf"```{kind}\n# (\S+\.\w+)\n(.*?)```", text, re.DOTALL))
