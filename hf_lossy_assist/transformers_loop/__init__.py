"""Policies inside Transformers' assisted generation: `attach` installs them, `rounds` drafts and accepts, and `assist` is
the way of calls whose models cannot be decoded in rows."""
