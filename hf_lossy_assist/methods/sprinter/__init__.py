"""SPRINTER: a head that accepts drafted tokens unseen."""
