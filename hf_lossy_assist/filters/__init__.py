"""Verify filters: how many drafted tokens of each row go to the target."""
