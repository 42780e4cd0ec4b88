"""The HTTP contract: requests checked, pool outcomes turned into verdicts, infrastructure faults into 503."""

import asyncio
import signal
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field, InstanceOf

from ctpo_sandbox.pool import Pool, PoolUnavailable, Run
from ctpo_sandbox.selftest import NEVER_ENFORCED, PROTECTIONS

Verdict = Literal["success", "timeout", "runtime_error"]
EXECUTE_PATH = "/faas/sandbox/"
_CLIENT_CLOSED_REQUEST = 499


class Execution(BaseModel):
    """One request. Timeouts are seconds; Python has no compile step, so `compile_timeout` is only checked.

    Text is taken as it comes: lone surrogates are legal JSON and pydantic's own `str` may refuse them.
    """

    code: InstanceOf[str]
    stdin: InstanceOf[str] = ""
    language: InstanceOf[str] = "python"
    compile_timeout: float = Field(10.0, gt=0, allow_inf_nan=False)
    run_timeout: float = Field(10.0, gt=0, allow_inf_nan=False)


@dataclass
class ServerState:
    """What `/health` reports besides the pool."""

    max_run_timeout_s: float
    memory_mb: int
    enforced: dict[str, bool]

    @property
    def not_enforced(self) -> list[str]:
        return [PROTECTIONS[name] for name, holds in self.enforced.items() if not holds] + list(NEVER_ENFORCED)


def verdict(run: Run) -> Verdict:
    """`timeout` only when a time limit fired, `success` only for exit code 0."""
    if run.outcome.timed_out:
        return "timeout"
    return "success" if run.outcome.exit_code == 0 else "runtime_error"


def _stderr(run: Run) -> str:
    code = run.outcome.exit_code
    if code >= 0:
        return run.stderr
    separator = "\n" if run.stderr and not run.stderr.endswith("\n") else ""
    return f"{run.stderr}{separator}[killed by signal {-code} ({signal.Signals(-code).name})]\n"


def answer(run: Run) -> dict[str, Any]:
    """The reply to one execution."""
    status = verdict(run)
    return {
        "status": status,
        "run_result": {
            "status": status,
            "stdout": run.stdout,
            "stderr": _stderr(run),
            "return_code": run.outcome.exit_code,
            "queue_s": run.queue_s,
            "wall_s": run.outcome.wall_s,
            "cpu_s": run.outcome.cpu_s,
            "maxrss_mb": run.outcome.maxrss_mb,
        },
        "created_at": datetime.now(UTC).isoformat(),
    }


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _run_while_connected(request: Request, pool: Pool, execution: Execution, timeout_s: float) -> Run | None:
    """None when the client hung up first; its snippet is dead then."""
    work = asyncio.ensure_future(
        pool.run(
            execution.code.encode("utf-8", errors="surrogatepass"),
            execution.stdin.encode("utf-8", errors="surrogatepass"),
            timeout_s,
        )
    )
    gone = asyncio.ensure_future(_client_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return await work if work.done() else None
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


def create_app(pool: Pool, state: ServerState) -> FastAPI:
    """The application over a started pool."""
    app = FastAPI(title="ctpo sandbox", openapi_url=None)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        """FastAPI's own handler echoes the input, which need not be encodable (NaN, lone surrogates)."""
        detail = [{"loc": [str(part) for part in item["loc"]], "msg": item["msg"]} for item in error.errors()]
        return JSONResponse({"detail": detail}, status_code=422)

    @app.post(EXECUTE_PATH)
    async def execute(execution: Execution, request: Request) -> JSONResponse:
        if execution.language != "python":
            raise HTTPException(400, f"language {execution.language[:80]!a} is not supported, only 'python'")
        timeout_s = min(execution.run_timeout, state.max_run_timeout_s)
        try:
            run = await _run_while_connected(request, pool, execution, timeout_s)
        except PoolUnavailable as error:
            raise HTTPException(503, f"the sandbox lost its worker twice: {error}") from error
        if run is None:
            return JSONResponse({"detail": "the client closed the connection"}, status_code=_CLIENT_CLOSED_REQUEST)
        return JSONResponse(answer(run))

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {
            "status": "ok",
            "slots": len(pool.workers),
            "idle": pool.idle,
            "executions": pool.executions,
            "worker_restarts": pool.restarts,
            "workers": [worker.pid for worker in pool.workers],
            "memory_mb": state.memory_mb,
            "max_run_timeout_s": state.max_run_timeout_s,
            "enforced": [PROTECTIONS[name] for name, holds in state.enforced.items() if holds],
            "not_enforced": state.not_enforced,
            "missing": pool.missing,
        }

    return app
