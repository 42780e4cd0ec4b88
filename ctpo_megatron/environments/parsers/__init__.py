"""Parsers of tool calls."""
