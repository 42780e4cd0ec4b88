"""Our batch script in place of NeMo Run's, which has no setting for it and would requeue a job that is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"
_OURS = " -m ctpo_launchers."


def use_our_template() -> None:
    """Let NeMo Run write the batch scripts of our jobs from our template; other jobs of an experiment keep its own."""
    from nemo_run.core.execution import slurm

    slurm.fill_template = _fill


def _fill(name: str, variables: dict[str, Any], *more: Any) -> str:
    from nemo_run.core.execution.utils import fill_template

    if not any(_OURS in text for text in variables["srun_commands"]):
        return str(fill_template(name, variables, *more))
    quoted = [
        text.replace("${SLURM_RESTART_COUNT:-0}", '"${SLURM_RESTART_COUNT:-0}"') for text in variables["srun_commands"]
    ]
    return f"{fill_template('slurm.sh.j2', {**variables, 'srun_commands': quoted}, str(TEMPLATES))}\n"
