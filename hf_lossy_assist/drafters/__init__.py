"""Where drafted tokens come from: one file for each drafter."""
