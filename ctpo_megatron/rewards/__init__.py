"""rewards room."""
