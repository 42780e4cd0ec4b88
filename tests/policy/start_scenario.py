"""Runs the `main` of a script of this folder: python start_scenario.py SCRIPT MODELS OUTPUT SCENARIOS.

The processes that a rank spawns to write a checkpoint import the file that was started: this one, not all of megatron.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

if __name__ == "__main__":
    script, models_dir, output, scenarios = sys.argv[1:]
    importlib.import_module(script).main(Path(models_dir), Path(output), json.loads(scenarios))
