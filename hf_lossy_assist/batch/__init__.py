"""The rows of a call: their texts, logits processors, positions and token types."""
