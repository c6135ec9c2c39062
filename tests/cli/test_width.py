"""Tables at 80 columns and less: nothing in them is cut."""

import pytest


@pytest.mark.parametrize("columns", ["80", "60"])
def test_policies(hf_lossy, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    done = hf_lossy("policies")
    assert done.code == 0 and "…" not in done.out
    assert max(map(len, done.out.splitlines())) <= int(columns)
    for name in ("all_but_last", "block_verification", "top_k", "svip"):
        assert f"\n{name}  " in done.out, name
