"""Train heads for a pair of models: jobs that run before a generate call, never inside it."""
