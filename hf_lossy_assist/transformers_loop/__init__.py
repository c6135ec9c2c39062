"""Policies inside Transformers' assisted generation: `attach` installs them, `candidates` drafts and filters, `processors` accept, and `assist` is
the way of calls whose models cannot be decoded in rows."""
