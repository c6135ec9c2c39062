"""Fitting policies to a pair of models: what runs before a generate call, never inside it."""
