"""The `hf-lossy` command. A file whose name begins with an underscore holds what commands share."""

from .app import app, main


__all__ = ["app", "main"]
