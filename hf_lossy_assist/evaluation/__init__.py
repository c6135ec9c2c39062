"""Measure policies side by side on models and prompts: their speed and the quality of their texts, with intervals."""
