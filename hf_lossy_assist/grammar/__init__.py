"""Structured output: grammars and JSON schemas as a logits processor."""
