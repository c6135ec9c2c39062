"""Speculative Verification: a companion that says which drafted tokens are worth verifying."""
