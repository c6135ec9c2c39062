"""Training of EAGLE-3 and DSpark drafters: the target writes texts (`collect`), and a network learns to draft them (`fit`)."""
