"""EAGLE-3 drafters trained here: the target writes texts (`collect`), a network learns to draft them (`fit`)."""
