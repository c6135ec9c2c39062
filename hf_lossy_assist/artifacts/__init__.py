"""What lies on disk or on the Hub: files, heads, profiles, cards."""
