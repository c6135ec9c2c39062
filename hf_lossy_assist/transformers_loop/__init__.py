"""Policies inside Transformers' own assisted generation: `attach` puts them there, `candidates` drafts and cuts, `processors` decide."""
