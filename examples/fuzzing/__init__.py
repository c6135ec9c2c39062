"""Wrong uses drawn at random, a file for each area; `examples/fuzz.py` runs them."""
