"""observe room."""
