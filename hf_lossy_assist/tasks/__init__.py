"""Tasks: where prompts come from, and which answers are right. Nothing in the runtime imports this."""
