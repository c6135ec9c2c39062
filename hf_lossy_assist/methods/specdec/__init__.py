"""SpecDec++: a head that ends the draft."""
