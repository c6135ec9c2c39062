"""SPRINTER: a head that accepts drafted tokens without verification."""
