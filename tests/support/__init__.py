"""What several tests share: tiny models, random blocks, exact enumeration, servers on loopback."""
