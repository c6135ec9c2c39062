"""Random wrong uses, one file per area; `tools/fuzz.py` runs them."""
