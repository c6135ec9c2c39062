"""The writer of a dataset's rows, on blocks as Ray passes them; no cluster."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from support import commands

import hf_lossy_assist as hla
from hf_lossy_assist.ray.dataset_writer import Writer
from hf_lossy_assist.server.row_writer import WRITTEN, seed_of_row


SETTINGS = {"policy": "svip", "max_new_tokens": 24, "max_rows": 4}


@pytest.fixture(scope="module")
def prompts():
    return [problem.prompt for problem in hla.demo.problems(5, seed=7)]


@pytest.fixture(scope="module")
def sampling():
    return Writer(**SETTINGS, do_sample=True, seed=3)


def test_texts_are_those_of_generate_many(prompts):
    models = hla.demo.load()
    settings = {"assistant_model": models.draft, "lossy_policy": "svip", "tokenizer": models.tokenizer}
    many = hla.generate_many(models.target, prompts, max_new_tokens=24, **settings)
    alone = {result.index: result for result in many}
    found = Writer(**SETTINGS)(pa.table({"prompt": prompts, "of": range(5)})).to_pylist()
    assert [row["token_ids"] for row in found] == [alone[n].token_ids for n in range(5)]
    assert [row["text"] for row in found] == [alone[n].text for n in range(5)]
    assert [row["of"] for row in found] == list(range(5)), "rows stay in order, with their other columns"
    for number, row in enumerate(found):
        assert row["error"] is None and len(row["token_sources"]) == len(row["token_ids"])
        assert row["speculation"]["num_new_tokens"] == len(row["token_ids"])
        ended = row["token_ids"][-1] == models.target.generation_config.eos_token_id
        assert row["finish_reason"] == ("stop" if ended else "length"), number


def test_a_sampled_text_depends_on_the_id_of_its_row_alone(prompts, sampling):
    rows = [{"id": f"row {n}", "prompt": prompt} for n, prompt in enumerate([*prompts, prompts[0]])]
    whole = sampling(pa.Table.from_pylist(rows)).to_pylist()
    apart = [sampling(pa.Table.from_pylist([row])).to_pylist()[0] for row in reversed(rows)][::-1]
    assert [row["token_ids"] for row in whole] == [row["token_ids"] for row in apart]
    assert whole[0]["token_ids"] != whole[5]["token_ids"], "one prompt under two ids"
    without = sampling(pa.table({"prompt": [prompts[0], prompts[1], prompts[0]]})).to_pylist()
    assert without[0]["token_ids"] == without[2]["token_ids"] != without[1]["token_ids"]
    assert len({seed_of_row(seed, name) for seed in (0, 1) for name in (0, "0", 1, [0], None)}) == 10


def test_broken_rows_get_an_error_and_the_others_their_texts(prompts, sampling):
    rows = [
        {"id": 0, "prompt": prompts[0]}, {"id": 1, "prompt": None}, {"id": 2, "prompt": ""},
        {"id": 3, "prompt": prompts[1], "max_new_tokens": 0},
        {"id": 4, "prompt": prompts[2], "max_new_tokens": 3},
        {"id": 5, "messages": [{"role": "user", "content": prompts[0]}]},
        {"id": 6, "messages": [{"role": "user", "content": None}]},
    ]  # fmt: skip
    turns = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    schema = pa.schema({"id": pa.int64(), "prompt": pa.string(), "max_new_tokens": pa.int64(), "messages": turns})
    found = sampling(pa.Table.from_pylist(rows, schema)).to_pylist()
    errors = [row["error"] for row in found]
    assert errors[0] is errors[4] is errors[5] is None
    assert len(found[4]["token_ids"]) == 3 and found[4]["finish_reason"] == "length"
    assert "expected a prompt or messages, got neither" in errors[1] and "no tokens" in errors[2]
    assert "max_new_tokens: expected" in errors[3] and "content" in errors[6]
    for row, error in zip(found, errors, strict=True):
        assert (row["text"] is None) == (error is not None) and (error is None or "\n" not in error)
    alone = sampling(pa.table({"id": [0], "prompt": [prompts[0]]})).to_pylist()[0]
    assert alone["token_ids"] == found[0]["token_ids"]


def test_rows_of_json_that_have_other_types(sampling):
    rows = [{"messages": messages} for messages in ("a", ["a"], [{"role": "user", "content": "a " * 40_001}])]
    rows += [{"prompt": prompt} for prompt in (7, [10**9], ["a"], {"a": 1}, [5] * 40_001, "a " * 40_001)]
    wrong = {"stop_strings": [[3]], "hints": [3], "text": ["there"], "error": [None, "before"], "top_p": [0.5]}
    rows += [{"prompt": [5], name: value} for name, values in wrong.items() for value in values]
    for row, found in zip(rows, sampling.rows.write(rows), strict=True):
        assert found["error"] and "\n" not in found["error"] and found.keys() == row.keys() | {"error"}, row
        assert found["error"] not in (None, row.get("error")), row
    assert sampling.rows.write([{"id": 3, "error": "no JSON"}]) == [{"id": 3, "error": "no JSON"}]


def test_a_prompt_of_all_the_targets_positions(sampling):
    """Its text, which lies beyond, is `generate`'s."""
    longest = hla.demo.load().target.config.max_position_embeddings
    found = sampling.rows.write([{"prompt": [5] * length} for length in (longest, longest + 1)])
    assert found[0]["error"] is None and found[0]["token_ids"]
    assert found[1]["error"] == f"the prompt has {longest + 1} tokens, and the target {longest} positions: shorten it"


def test_a_row_that_ends_the_others_texts_is_found(prompts, sampling, monkeypatch):
    """Errors that arise while texts are written, as of a model whose logits are not finite."""
    from hf_lossy_assist.server import row_writer

    def many(target, given, numbers, **settings):
        for result in hla.generate_many(target, given, numbers=numbers, **settings):
            if any(prompt["prompt"] == prompts[1] for prompt in given):
                raise ValueError("its logits are not finite")
            yield result

    whole = sampling(pa.table({"prompt": prompts})).to_pylist()
    monkeypatch.setattr(row_writer, "generate_many", many)
    found = sampling(pa.table({"prompt": [prompts[1], prompts[0]]})).to_pylist()
    assert found[1]["token_ids"] == whole[0]["token_ids"] and found[1]["error"] is None
    assert found[0]["error"] == "its logits are not finite" and found[0]["token_ids"] is None


def test_wrong_uses(prompts, sampling):
    for name in WRITTEN:
        with pytest.raises(ValueError, match=f"there is a column '{name}'.*rename it, or drop it"):
            sampling(pa.table({"prompt": prompts, name: prompts}))
    with pytest.raises(ValueError, match="there are two columns 'prompt'"):
        sampling(pa.table([pa.array(prompts), pa.array(prompts)], names=["prompt", "prompt"]))
    for name in ("temperature", "max_tokens"):
        found = sampling(pa.table({"prompt": prompts[:2], name: [None, 1]}))["error"].to_pylist()
        assert found[0] is None and f"'{name}' in a row does nothing: a row has max_new_tokens" in found[1]


def test_other_columns_pass_unread(prompts, sampling):
    """Whether Python could hold them or not."""
    others = {"speed": 1, "hint": "x", "policy": "of a bank", "of": object}
    assert sampling.rows.write([{"prompt": prompts[0]} | others])[0]["text"]
    far = pa.array([10**13, 1], pa.timestamp("s"))
    found = sampling(pa.table({"prompt": prompts[:2], "when": far}))
    assert found["error"].to_pylist() == [None, None] and found["when"].chunk(0).equals(far)
    with pytest.raises(TypeError, match="pass batch_format"):
        sampling({"prompt": prompts[:1]})


def test_a_chats_seed_depends_on_its_messages_alone(sampling):
    """Arrow fills fields that another row of the block has."""
    first = {"messages": [{"role": "user", "content": "1+1="}]}
    second = {"messages": [{"role": "user", "content": "2+2=", "name": "Bo"}]}
    for one, other in ((first, second), ({"prompt": "1+1=", "id": {"a": 1}}, {"prompt": "2+2=", "id": {"b": 1}})):
        texts = [sampling(pa.Table.from_pylist(rows))["token_ids"][0] for rows in ([one], [one, other])]
        assert texts[0] == texts[1] and texts[0].as_py()


def test_token_ids_in_an_array_are_those_of_a_list(sampling):
    """As Ray's tensor columns have them: the same seed, the same bound on the length."""
    ids, long = [5, 6, 7], np.ones(5000, int)
    found = sampling.rows.write([{"prompt": ids}, {"prompt": np.array(ids)}, {"prompt": long}])
    assert found[0]["token_ids"] == found[1]["token_ids"] and "5000 tokens" in found[2]["error"]


@pytest.mark.full
def test_the_packages_that_the_writer_needs():
    """None of the server's; without Ray one line says how to install it, and the package imports none of it before it is used."""
    without = "sys.modules |= dict.fromkeys(({}), None)\n"
    code = "import sys; sys.path.insert(0, sys.argv[1])\nimport hf_lossy_assist as hla\n" + without.format("'ray',")
    code += "try: hla.ray.Writer\nexcept ImportError as error: print(error)\ndel sys.modules['ray']\n"
    code += without.format("'starlette', 'uvicorn', 'prometheus_client'") + "print(hla.ray.Writer.__name__)"
    done = subprocess.run([sys.executable, "-c", code, str(commands.ROOT)], capture_output=True, text=True)
    expected = "hf_lossy_assist.ray.Writer needs ray: pip install 'hf_lossy_assist[ray]'\nWriter\n"
    assert done.stdout == expected, done.stderr
