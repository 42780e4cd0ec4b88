"""What serves engines on a CPU alone: an engine core in the process, and replacements of parts of vLLM."""
