"""The tags around a model's thinking."""

OPEN, CLOSE = "<think>", "</think>"
