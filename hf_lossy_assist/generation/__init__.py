"""The door to Transformers: what generate() is given, what it returns, what is refused."""
