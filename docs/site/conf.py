"""The documentation site: `make docs`. Its sources are the repository's own pages, at their own paths."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from myst_parser.parsers.sphinx_ import MystParser

ROOT = Path(__file__).resolve().parents[2]

project = "ctpo-megatron"
author = "The ctpo-megatron authors"
version = release = runpy.run_path(str(ROOT / "ctpo_megatron" / "__init__.py"))["__version__"]

extensions = ["myst_parser", "sphinx_reredirects"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/**.md", "examples/*.md", "answers/*.md", "kernels/*.md"]
include_patterns += ["docs/notebooks/*.ipynb", "examples/*.ipynb"]
exclude_patterns = [".*", "build", "runs", "tests", "models", "data"]
EXTENSIONS = (
    "reward",
    "judge",
    "tool",
    "tool-parser",
    "environment",
    "filter",
    "sampler",
    "tracker",
    "objective",
    "model-family",
)
redirects = {
    f"docs/{old}": f"{'../' * old.count('/')}{new}"
    for old, new in {
        "architecture": "concepts.html",
        "benchmarks": "../benchmarks/README.html",
        "containers": "install_cuda.html#containers",
        "doctor": "monitoring.html#check-the-machine",
        "from_bare_node": "cluster.html",
        "from_nemo_rl_and_slime": "coming_from.html",
        "from_trl": "coming_from.html",
        "from_verl": "coming_from.html",
        "glossary": "concepts.html#words",
        **{f"howto/{kind.replace('-', '_')}": f"extending.html#{kind}" for kind in EXTENSIONS},
        "howto/does_not_learn": "monitoring.html#a-run-that-does-not-learn",
        "howto/memory": "monitoring.html#make-it-fit",
        "howto/parts": "extending.html",
        "howto/preemption": "checkpoints.html#when-a-stop-is-requested",
        "limits": "status.html#known-limits",
        "moe": "parallelism.html#mixtures-of-experts",
        "profiling": "monitoring.html#profile-a-step",
        "scale": "../benchmarks/results/scale.html",
        "serving": "evaluation.html#serve-the-result",
        "sweep": "compare.html#run-a-grid",
        "tutorials/compare_objectives": "compare.html",
        "tutorials/own_reward": "extending.html#reward",
        "tutorials/plain_rl": "tutorials/own_model.html#a-task-that-runs-in-two-minutes",
        "tutorials/slurm": "cluster.html#check-launch-use",
    }.items()
}
"""Pages that were merged into others, and where their subject is now."""
smartquotes = False  # `--dry-run` has two hyphens
myst_heading_anchors = 4  # links to headings, as GitHub names them

html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"{project} {version}"
html_copy_source = False
html_show_sourcelink = False

notebook = runpy.run_path(str(ROOT / "docs" / "site" / "notebook.py"))


class NotebookParser(MystParser):
    """Reads a notebook as the page that its cells make."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: nodes.document) -> None:
        super().parse(notebook["markdown"](inputstring), document)


def setup(app: Any) -> None:
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("build-finished", copy_figures)


def formula(writer: Any, node: nodes.Element) -> None:
    """MathML, which browsers draw themselves: Sphinx' own renderers need a network or LaTeX."""
    block = isinstance(node, nodes.math_block)
    writer.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def copy_figures(app: Any, _error: Exception | None) -> None:
    """Those of `<picture>`, whose sources Sphinx does not see."""
    shutil.copytree(ROOT / "docs" / "figures", Path(app.outdir) / "docs" / "figures", dirs_exist_ok=True)
