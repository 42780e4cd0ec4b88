"""objective room."""
