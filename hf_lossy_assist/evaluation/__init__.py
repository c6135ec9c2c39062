"""Which policy is how fast on these models and prompts, and what its texts are worth: measured side by side, with intervals."""
