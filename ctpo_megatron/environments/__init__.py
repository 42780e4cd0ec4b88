"""Environments: one episode of a prompt: model turns, tool calls, observations, budgets. No vLLM, no Ray."""
