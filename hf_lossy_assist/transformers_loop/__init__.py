"""Policies inside Transformers' assisted generation: `attach` installs them, `candidates` drafts and filters, `processors` accept."""
