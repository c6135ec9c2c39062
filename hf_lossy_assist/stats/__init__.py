"""Statistics of generate calls: counts, seconds, estimates and their intervals."""
