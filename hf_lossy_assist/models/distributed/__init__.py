"""Targets whose weights are spread over processes: by tensor parallelism, and by FSDP2."""
