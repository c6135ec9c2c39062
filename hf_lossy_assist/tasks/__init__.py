"""Tasks: prompts, and whether answers are right. Nothing in the runtime imports this."""
