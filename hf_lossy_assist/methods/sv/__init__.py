"""Speculative Verification: a companion model that predicts which drafted tokens are worth verifying."""
