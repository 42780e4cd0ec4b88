"""Isolated Python execution service and its client; no torch, usable without the rest of the project."""
