"""Run: its directory and owner, answer to SIGTERM, and the signals that its children are spared."""
