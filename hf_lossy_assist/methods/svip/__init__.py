"""SVIP: calibration of the entropy at which a draft ends."""
