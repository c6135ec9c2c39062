"""The decoding loop: draft, select, verify, accept, commit."""
