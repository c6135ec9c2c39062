"""An OpenAI-compatible server: many clients' texts, written together."""
