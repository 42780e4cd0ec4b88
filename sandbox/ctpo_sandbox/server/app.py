"""The HTTP API: checks requests, and turns pool outcomes into verdicts and infrastructure faults into 503."""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field, InstanceOf, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from ctpo_sandbox.errors import RunFault
from ctpo_sandbox.front import Gate
from ctpo_sandbox.inside.libraries import absent
from ctpo_sandbox.records import LEVELS, Verdict
from ctpo_sandbox.server.metrics import Metrics
from ctpo_sandbox.server.pool import Pool, RunResult
from ctpo_sandbox.server.selftest import NEVER_ENFORCED, PROTECTIONS
from ctpo_sandbox.variables import FAULT_HEADER

EXECUTE_PATH = "/faas/sandbox/"
FUSION_PATH = "/run_code"
_CLIENT_CLOSED_REQUEST = 499
_CLIENT_GONE = "the client closed the connection"


class ExecutionRequest(BaseModel):
    """One request. Timeouts are seconds; Python has no compile step, so `compile_timeout` is only checked.

    Text is accepted unchanged: lone surrogates are legal JSON, but pydantic's `str` may refuse them.
    """

    code: InstanceOf[str]
    stdin: InstanceOf[str] = ""
    language: InstanceOf[str] = "python"
    compile_timeout: float = Field(10.0, gt=0, allow_inf_nan=False)
    run_timeout: float = Field(10.0, gt=0, allow_inf_nan=False)


@dataclass
class ServerState:
    """What `/health` reports in addition to the pool. ends: whether the server is shutting down."""

    enforced: dict[str, bool]
    token: str | None = None
    refused_levels: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    ends: Callable[[], bool] = lambda: False

    @property
    def not_enforced(self) -> list[str]:
        return [PROTECTIONS[name] for name, holds in self.enforced.items() if not holds] + list(NEVER_ENFORCED)


def verdict(run: RunResult) -> Verdict:
    """`timeout` only when a time limit fired, `success` only for exit code 0."""
    if run.outcome.timed_out:
        return "timeout"
    return "success" if run.outcome.exit_code == 0 else "runtime_error"


def _stderr(run: RunResult) -> str:
    code, reason = run.outcome.exit_code, run.outcome.killed_for
    if code >= 0:
        return run.stderr
    separator = "\n" if run.stderr and not run.stderr.endswith("\n") else ""
    return f"{run.stderr}{separator}[killed {reason or f'by signal {_signal_name(-code)}'}]\n"


def _signal_name(number: int) -> str:
    """Its number and name; most real-time signals have no name, and the C library keeps two for itself."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:
        return str(number)


def answer(run: RunResult) -> dict[str, Any]:
    """Return the reply to one execution."""
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
            "truncated": run.truncated,
        },
        "created_at": datetime.now(UTC).isoformat(),
    }


def fusion_answer(run: RunResult) -> dict[str, Any]:
    """Return the same in the format of SandboxFusion's `/run_code`, which verl's sandbox tool uses."""
    status = verdict(run)
    return {
        "status": "Success" if status == "success" else "Failed",
        "message": "",
        "compile_result": None,
        "run_result": {
            "status": "TimeLimitExceeded" if status == "timeout" else "Finished",
            "execution_time": run.outcome.wall_s,
            "return_code": run.outcome.exit_code,
            "stdout": run.stdout,
            "stderr": _stderr(run),
        },
        "executor_pod_name": None,
        "files": {},
    }


async def _end_with_client(request: Request, work: asyncio.Timeout) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    work.reschedule(asyncio.get_running_loop().time())


async def _run_while_connected(
    request: Request, pool: Pool, execution: ExecutionRequest, timeout_s: float
) -> RunResult | None:
    """None when the client disconnected first; its snippet is then killed."""
    work = asyncio.timeout(None)
    try:
        async with work:
            watch = asyncio.ensure_future(_end_with_client(request, work))
            try:
                return await pool.run(execution.code, execution.stdin, timeout_s)
            finally:
                watch.cancel()
    except TimeoutError:
        if not work.expired():  # the run's own
            raise
        return None


async def _read_request(request: Request) -> ExecutionRequest:
    """The execution requested. Raises HTTPException."""
    try:
        body = await request.body()
    except ClientDisconnect:
        raise HTTPException(_CLIENT_CLOSED_REQUEST, _CLIENT_GONE) from None
    try:
        return ExecutionRequest.model_validate(json.loads(body))
    except ValidationError as error:  # without the input, which may not be encodable (NaN, lone surrogates)
        found = [{"loc": ["body", *map(str, item["loc"])], "msg": item["msg"]} for item in error.errors()]
        raise HTTPException(422, found) from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(422, [{"loc": ["body"], "msg": f"not JSON: {error}"[:200]}]) from error


def create_app(pool: Pool, state: ServerState, node: str = "") -> FastAPI:
    """Return the application over a started pool; `node`: the label of its metrics."""
    metrics = Metrics(pool, node)

    async def refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, StarletteHTTPException)
        metrics.rejected(error.status_code)
        return JSONResponse({"detail": error.detail}, status_code=error.status_code, headers=error.headers)

    async def run(request: Request) -> RunResult:
        execution = await _read_request(request)
        if execution.language != "python":
            raise HTTPException(400, f"language {execution.language[:80]!a} is not supported, only 'python'")
        timeout_s = min(execution.run_timeout, pool.limits.run_timeout_s)
        try:
            finished = await _run_while_connected(request, pool, execution, timeout_s)
        except asyncio.QueueFull as error:  # one second is the least that the header can say
            raise HTTPException(503, str(error), headers={"retry-after": "1"}) from error
        except RunFault as error:
            detail = f"the sandbox could not carry out the run: {error}"
            raise HTTPException(503, detail, headers={FAULT_HEADER: error.over} if error.over else None) from error
        if finished is None:
            raise HTTPException(_CLIENT_CLOSED_REQUEST, _CLIENT_GONE)
        metrics.finished(finished, verdict(finished))
        return finished

    def endpoint(form: Callable[[RunResult], dict[str, Any]]) -> Callable[[Request], Awaitable[JSONResponse]]:
        async def respond(request: Request) -> JSONResponse:
            return JSONResponse(form(await run(request)))

        return respond

    runs = [
        Route(EXECUTE_PATH, endpoint(answer), methods=["POST"]),
        Route(FUSION_PATH, endpoint(fusion_answer), methods=["POST"]),
    ]
    gate = Middleware(Gate, token=state.token, max_bytes=pool.limits.request_mb << 20, rejected=metrics.rejected)
    routes: list[BaseRoute] = [*runs, *_reports(pool, state, metrics)]
    # Starlette's routes: with FastAPI's own, each run costs 0.15 ms more CPU time.
    # Starlette's class: it is the base of FastAPI's, and what the gate raises.
    handlers: dict[int | type[Exception], Any] = {StarletteHTTPException: refused}
    return FastAPI(openapi_url=None, routes=routes, middleware=[gate], exception_handlers=handlers)


def _reports(pool: Pool, state: ServerState, metrics: Metrics) -> list[Route]:
    async def live(_: Request) -> JSONResponse:
        return JSONResponse({"status": "live"})

    async def ready(_: Request) -> JSONResponse:
        is_ready = not (pool.full or state.ends())
        return JSONResponse({"status": "ready" if is_ready else "busy"}, status_code=200 if is_ready else 503)

    async def expose(_: Request) -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok", **_condition(pool, state, metrics), "not_installed": not_installed})

    not_installed = absent()
    found = {"/live": live, "/ready": ready, "/metrics": expose, "/health": health}
    return [Route(path, report) for path, report in found.items()]


def _condition(pool: Pool, state: ServerState, metrics: Metrics) -> dict[str, Any]:
    return {
        "level": pool.level,
        "tier": LEVELS[pool.level],
        "slots": pool.slots,
        "idle": pool.idle,
        "waiting": pool.waiting,
        "executions": metrics.runs,
        "restarts": pool.restarts,
        "workers": [worker.pid for worker in pool.workers],
        "templates": {name: template.pid for name, template in pool.templates.items()},
        "libraries": {name: list(template.library.modules) for name, template in pool.templates.items()},
        "limits": asdict(pool.limits),
        "max_waiting": pool.max_waiting,
        "enforced": [PROTECTIONS[name] for name, holds in state.enforced.items() if holds],
        "not_enforced": state.not_enforced,
        "missing": pool.missing,
        "refused_levels": state.refused_levels,
        "versions": state.versions,
    }
