"""Model quirks."""
