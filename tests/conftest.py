"""What every test runs under: no network, one thread, the same hypothesis examples each time."""

import os


os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings


torch.set_num_threads(1)

# Tiny models are slow enough on a shared core for hypothesis to call an example late; no test here measures time.
settings.register_profile(
    "ci", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def seeded():
    """Every test starts from the same random state, whatever ran before it."""
    torch.manual_seed(0)
