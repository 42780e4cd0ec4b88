"""The usual sandbox of RL trainers, as the other side of `benchmarks/sandbox.py`: a fresh interpreter per request.

FastAPI in several processes; each request writes main.py into a new directory and runs `python main.py` there, inside
bubblewrap or with no isolation (BASELINE_ISOLATION=bwrap|none). Speaks the same contract as `ctpo_sandbox`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

BWRAP = (
    *("bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-net", "--unshare-ipc"),
    *("--die-with-parent", "--new-session"),
)


class Execution(BaseModel):
    """One request."""

    code: str
    stdin: str = ""
    language: str = "python"
    compile_timeout: float = 10.0
    run_timeout: float = 10.0


app = FastAPI()


@app.get("/health")
def health() -> dict[str, str]:
    """Whether the server is up."""
    return {"status": "ok"}


@app.post("/faas/sandbox/")
async def execute(execution: Execution) -> dict[str, Any]:
    """Run the code in a process of its own."""
    folder = tempfile.mkdtemp()
    try:
        Path(folder, "main.py").write_text(execution.code)
        box = (*BWRAP, "--bind", folder, folder) if os.environ.get("BASELINE_ISOLATION") == "bwrap" else ()
        process = await asyncio.create_subprocess_exec(
            *box,
            sys.executable,
            "main.py",
            cwd=folder,
            stdin=asyncio.subprocess.PIPE if execution.stdin else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(
                process.communicate(execution.stdin.encode() or None), execution.run_timeout
            )
            status = "success" if process.returncode == 0 else "runtime_error"
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            out, err, status = b"", b"", "timeout"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result = {"status": status, "stdout": out.decode(), "stderr": err.decode(), "return_code": process.returncode}
    return {"status": status, "run_result": result, "created_at": datetime.now(UTC).isoformat()}
