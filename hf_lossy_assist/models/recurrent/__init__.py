"""Rollback of recurrent states."""
