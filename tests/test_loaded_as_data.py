"""Files that others may have written are loaded as data: no module loads a pickle, but for listed ones."""

from __future__ import annotations

import ast

import pytest

from tests.test_architecture import PACKAGE, all_modules, show

UNPICKLED = {
    "policy/checkpoint.py": "what writers of checkpoints tell the process that started them",
    "policy/checkpoint_files.py": "the unpickler that is limited to data",
    "policy/parallel.py": "results of rank zero, by the store of the job",
    "verify/job.py": "what the process that started it wrote into a folder of its own",
    "verify/run.py": "what its own processes wrote into a folder of its own",
}
"""Files that load a pickle, with whose pickle it is."""

_PICKLES = ("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
_UNSAFE = ("yaml.load", "yaml.full_load", "yaml.unsafe_load", "yaml.load_all", "pandas.read_pickle", "pd.read_pickle")


def _pickles_loaded(text: str) -> list[int]:
    """Lines of a file that may run what they load."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module in _PICKLES:
            found.append(node.lineno)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _PICKLES:
            found += [node.lineno] * ("load" in node.attr.lower() or "unpickler" in node.attr.lower())
        if isinstance(node, ast.Call):
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            name = ast.unparse(node.func)
            unsafe = name in _UNSAFE or options.get("allow_pickle") == "True"
            torch_load = name in ("torch.load", "torch_load") and options.get("weights_only") != "True"
            found += [node.lineno] * (unsafe or torch_load)
    return found


def test_files_are_loaded_as_data() -> None:
    """Files that others may have written run nothing: checkpoints, models, data, recordings."""
    found = {
        str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else show(path, line, "pickle")
        for path in all_modules()
        for line in _pickles_loaded(path.read_text(encoding="utf-8"))
    }
    assert found == set(UNPICKLED)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.load(file)",
        "import torch\ntorch.load(file, weights_only=False)",
        "import torch\ntorch.load(file, weights_only=safe)",
        "from pickle import loads",
        "import pickle\nread = pickle.loads",
        "import pickle\nclass Mine(pickle.Unpickler): pass",
        "import numpy\nnumpy.load(file, allow_pickle=True)",
        "import yaml\nyaml.load(file, Loader=yaml.Loader)",
    ],
)
def test_a_pickle_that_is_loaded_is_seen(text: str) -> None:
    assert _pickles_loaded(text)


def test_data_may_be_loaded_and_pickles_written() -> None:
    text = (
        "torch.load(file, weights_only=True)\npickle.dumps(1)\njson.loads(text)\nnumpy.load(file)\nyaml.safe_load(file)"
    )
    assert _pickles_loaded(text) == []
