"""Wrong uses drawn at random, a file for each area; `tools/fuzz.py` runs them."""
