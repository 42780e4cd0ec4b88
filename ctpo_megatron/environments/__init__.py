"""Environments: the episode of a prompt, with model turns, tool calls, messages and budgets. No vLLM, no Ray."""
