"""The code interpreter: runs a Python program in the sandbox and shows the model what it printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ctpo_megatron.config import SandboxConfig
from ctpo_megatron.environments.protocol import Schema, ToolResult, ToolUnavailable
from ctpo_sandbox.records import WALL_FACTOR

if TYPE_CHECKING:
    from ctpo_sandbox import ExecutionResult

TOOL_NAME = "code_interpreter"
_STDERR_CHARS = 2000
_REQUESTS_PER_SLOT = 4


class PythonTool:
    """Every call starts a fresh interpreter on one of the servers of `url` (several are separated by commas).

    engines: processes that share `sandbox.max_concurrency`. nodes: each has a server of ours for its share of them.
    """

    schema: ClassVar[Schema] = {
        "type": "function",
        "function": {
            "name": TOOL_NAME,
            "description": "Run a Python program and return what it prints. Every call starts a fresh interpreter.",
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {"type": "string", "description": "Python source; print() what you need to see."}
                },
                "required": ["code"],
            },
        },
    }

    def __init__(self, sandbox: SandboxConfig, url: str, engines: int, nodes: int = 1) -> None:
        from ctpo_sandbox import SandboxClient

        limit = sandbox.max_concurrency // engines
        if sandbox.url is None:  # our own server: more than keeps its slots busy only makes the HTTP pool slow
            limit = min(limit, _REQUESTS_PER_SLOT * sandbox.slots // -(-engines // nodes))
        self._client = SandboxClient(
            url.split(","), max_concurrency=max(1, limit), request_timeout_s=sandbox.request_timeout_s
        )
        self._run_timeout_s = sandbox.run_timeout_s

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        """Run `arguments["code"]`. Raises ToolUnavailable when the sandbox cannot be reached."""
        from ctpo_sandbox import SandboxUnavailable

        try:
            execution = await self._client.run(arguments["code"], run_timeout_s=self._run_timeout_s)
        except SandboxUnavailable as error:
            raise ToolUnavailable(str(error)) from error
        return self.shown(execution, self._run_timeout_s)

    @staticmethod
    def shown(execution: ExecutionResult, run_timeout_s: float) -> ToolResult:
        """Return what the model is shown: stdout on success, else status, the end of stderr and any stdout; the limit
        it hit.

        Trailing newlines are dropped, as the chat template writes its own.
        """
        stdout = execution.stdout.rstrip("\n")
        if execution.status == "success":
            return ToolResult(stdout, exec_s=execution.wall_s)
        stderr = execution.stderr.strip("\n")
        if len(stderr) > _STDERR_CHARS:
            stderr = f"[... {len(stderr) - _STDERR_CHARS} characters cut ...]\n{stderr[-_STDERR_CHARS:]}"
        status = f"[{execution.status}]"
        if execution.status == "timeout":
            status += (
                f" A program may compute for {run_timeout_s:g} s, and end after {WALL_FACTOR * run_timeout_s:g} s."
            )
        parts = [status, stderr, f"[stdout before the error]\n{stdout}" if stdout else ""]
        return ToolResult("\n".join(part for part in parts if part), execution.status, execution.wall_s)
