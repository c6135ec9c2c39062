"""Texts of tokens: incremental decoding, and structured output by grammars and JSON schemas."""
