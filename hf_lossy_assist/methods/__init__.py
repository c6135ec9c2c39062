"""A room for each published method: how its data is collected, its head trained, its cost predicted."""
