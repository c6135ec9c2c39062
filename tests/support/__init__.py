"""Shared parts of tests: tiny models, random blocks, exact enumeration, servers on loopback."""
