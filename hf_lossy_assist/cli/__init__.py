"""The `hf-lossy` command: one file for each command, shared options in `options`."""

from .app import app, main


__all__ = ["app", "main"]
