"""SVIP: the entropy at which a draft ends, calibrated."""
