"""What a Transformers model is, and how it runs on a cache that can forget."""
