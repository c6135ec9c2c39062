"""The `hf-lossy` command. Files whose names begin with an underscore are shared by commands."""

from .app import app, main


__all__ = ["app", "main"]
