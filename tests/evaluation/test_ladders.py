"""Which settings a list of policies stands for."""

import pytest

from hf_lossy_assist.evaluation.tuning import expand, parse_search_space


def test_a_rule_without_its_parameter_is_its_ladder():
    assert expand("top_k+svip") == ["top_k:k=2+svip", "top_k:k=3+svip", "top_k:k=4+svip", "top_k:k=8+svip"]
    assert expand("typical:delta=0.5+fallback")[0] == "typical:delta=0.5,epsilon=0.5+fallback"
    assert expand("sprinter:head=folder")[-1] == "sprinter:head=folder,threshold=0.5"
    for alone in ("svip", "top_k:k=3+svip", '{"stop": "svip"}', "strict", "all_but_last"):
        assert expand(alone) == [alone]


def test_a_field_of_settings():
    field = parse_search_space(["svip", "top_k+svip", "lenience:lenience=0.5", "lenience:lenience=0.3", "strict"])
    assert list(field.lossless) == ["svip", "strict"] and len(field.policies) == 8
    assert [(step.ladder, step.place) for step in field.steps] == [
        *(("top_k+svip", place) for place in range(4)), ("lenience", 0), ("lenience", 1),
    ]  # fmt: skip
    assert all(field.policies[step.name].lossless is False for step in field.steps)


def test_something_lossless_must_be_beaten():
    with pytest.raises(ValueError, match=r"^no lossless policy is among these: add svip[^\n]*$"):
        parse_search_space(["top_k"])
