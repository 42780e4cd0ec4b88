"""Environments: one episode of a prompt: model turns, tool calls, messages, budgets. No vLLM, no Ray."""
