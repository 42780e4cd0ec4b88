"""What asks servers: the client of a rollout, and its choice of a server for each request."""

from ctpo_sandbox.client.client import ClientStats, ExecutionResult, SandboxClient

__all__ = ["ClientStats", "ExecutionResult", "SandboxClient"]
