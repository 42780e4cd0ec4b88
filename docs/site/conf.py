"""The documentation site: `make docs`. Its sources are the repository's own pages, at their own paths."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

project = "ctpo-megatron"
author = "The ctpo-megatron authors"
version = release = runpy.run_path(str(ROOT / "ctpo_megatron" / "__init__.py"))["__version__"]

extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/**.md", "examples/*.md", "answers/*.md", "kernels/*.md"]
exclude_patterns = [".*", "build", "runs", "tests", "models", "data"]
smartquotes = False  # `--dry-run` has two hyphens
myst_heading_anchors = 4  # links to headings, as GitHub names them

html_theme = "furo"
html_title = f"{project} {version}"
html_copy_source = False
html_show_sourcelink = False


def setup(app: Any) -> None:
    app.connect("build-finished", copy_figures)


def copy_figures(app: Any, _error: Exception | None) -> None:
    """Those of `<picture>`, whose sources Sphinx does not see."""
    shutil.copytree(ROOT / "docs" / "figures", Path(app.outdir) / "docs" / "figures", dirs_exist_ok=True)
