"""Policies: a rule, a stop and a filter; their recipes, short form, JSON form and files."""
