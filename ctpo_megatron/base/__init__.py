"""Base: what every package may use and what imports nothing of ours. Its modules are named directly."""
