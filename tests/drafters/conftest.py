"""Fixtures for tests of drafters' files."""

import pytest
from support import eagle, small

import hf_lossy_assist as hla


@pytest.fixture(scope="module")
def target():
    return hla.enable(small.llama(layers=3))


@pytest.fixture
def folder(target, tmp_path):
    """A drafter as `speculators` writes it."""
    hla.save_drafter(eagle.drafter(target), tmp_path / "drafter", target)
    return tmp_path / "drafter"
