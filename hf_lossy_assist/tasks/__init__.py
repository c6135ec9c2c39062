"""Reading prompts and, later, scoring answers. Nothing in the runtime imports this."""
