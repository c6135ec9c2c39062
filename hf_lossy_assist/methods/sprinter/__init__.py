"""SPRINTER: a head that accepts drafted tokens unchecked."""
