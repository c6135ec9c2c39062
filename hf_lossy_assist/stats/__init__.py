"""What a call did, and what it would have taken without drafts."""
