"""Shared by several tests."""

from pathlib import Path
from typing import Any

import pytest


def refused(call: Any, words: str, error: type[Exception] = ValueError) -> str:
    with pytest.raises(error, match=words) as caught:
        call()
    assert type(caught.value) is error and "\n" not in str(caught.value)
    return str(caught.value)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
