"""Files on disk and on the Hub: heads, profiles, certificates, cards."""
