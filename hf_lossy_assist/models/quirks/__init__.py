"""Model quirks: what some families compute from the length of a whole batch, which rows of different length need for each row.

A quirk is a function of a model that yields a `Patch` for each function of Transformers that it changes. A new one takes three files: the
quirk (in a file of this folder), its line in `QUIRKS` (`forward.py`), and its test in `tests/models/test_quirks.py`.
"""
