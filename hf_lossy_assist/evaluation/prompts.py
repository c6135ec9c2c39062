"""Prompts from JSON-lines files."""

import json
from pathlib import Path


FIELDS = ("prompt", "question", "turns")  # our own, GSM8K's, Spec-Bench's (its first turn)


def read_prompts(path: str | Path, limit: int | None = None) -> list[str]:
    """The prompt of each line: its `prompt`, `question` (GSM8K) or first of `turns` (Spec-Bench).

    Raises: `ValueError` with file and line where a line has none of them; `FileNotFoundError`.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    prompts: list[str] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        if limit is not None and len(prompts) == limit:
            break
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from None
        found = next((row[f] for f in FIELDS if isinstance(row, dict) and row.get(f)), None)
        prompt = found[0] if isinstance(found, list) else found
        if not isinstance(prompt, str):
            raise ValueError(
                f"{path}, line {number}: expected a text under one of {', '.join(FIELDS)}, got {line[:60]!r}"
            )
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts
