"""Policies: a rule, a stop and a filter; their JSON form, their names, their catalogue."""
