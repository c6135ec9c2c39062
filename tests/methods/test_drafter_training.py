"""Training an EAGLE-3 or a DSpark drafter: what it learns is what it drafts, a killed run goes on exactly, and it learns."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from support import small
from support.commands import prompts_file
from support.refusals import refused
from support.tokenizers_by_kind import KINDS, STOP, build_tokenizer

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.networks.base import HiddenStateModel
from hf_lossy_assist.methods.drafter_settings import DSparkFitSettings
from hf_lossy_assist.methods.eagle3 import unrolled_loss as module
from hf_lossy_assist.methods.eagle3.collect import TextDataset, TextSettings, collect_texts
from hf_lossy_assist.methods.eagle3.fit import fit_drafter, measure, split_texts
from hf_lossy_assist.methods.eagle3.initialise import DrafterFitSettings, make_dspark_network, make_network
from hf_lossy_assist.methods.eagle3.unrolled_loss import ChainStep, count_accepted, count_calls, unroll, unroll_blocks
from hf_lossy_assist.models.packed_linears import quantised


PROMPTS = [f"w{3 + i} w{7 + i % 5} w{11 + 2 * i}" for i in range(20)]
TALK = [{"from": "human", "value": "Tom has"}, {"from": "gpt", "value": "another model's"}]
SETTINGS = TextSettings(new_tokens=16, layers=(0, 1, 2), batch_size=6)
SHORT = DrafterFitSettings(
    steps=3, epochs=2, batch_size=5, vocabulary=30, likely=60, save_every=3, held_out=0.2, intermediate_size=48
)


def short(**changes):
    return DrafterFitSettings(**vars(SHORT) | changes)


@pytest.fixture(scope="module")
def target():
    return hla.enable(small.llama(layers=3).float())


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    return collect_texts(target, small.tokenizer(), PROMPTS, tmp_path_factory.mktemp("eagle3") / "texts", SETTINGS)


def test_texts_are_the_targets(target, data):
    texts, tokenizer = TextDataset(data, target, 60), small.tokenizer()
    assert len(texts) == len(PROMPTS)
    for number in (0, 7, 19):
        ids = tokenizer(PROMPTS[number], return_tensors="pt")["input_ids"]
        expected = target.generate(ids, max_new_tokens=16, do_sample=False)[0]
        assert texts.ids[number].tolist() == expected.tolist() and texts.prompts[number] == ids.shape[1]
        batch = texts.batch([number, 3], 100)
        with torch.no_grad():
            out = target(expected[None], output_hidden_states=True)
        states, length = torch.cat([out.hidden_states[layer] for layer in (0, 1, 2)], dim=-1), len(expected)
        assert batch.states[:1, :length].equal(states.bfloat16()) and batch.likely.shape[-1] == 60
        full = torch.zeros_like(out.logits).scatter_(-1, batch.likely[:1, :length], batch.probs[:1, :length])
        assert full[full > 0].equal(out.logits.softmax(-1)[full > 0]) and full.sum(-1).min() > 0.6


@pytest.mark.full
@pytest.mark.parametrize("skip_special_tokens, new_tokens", [(False, 60), (True, 60), (True, 40)])
def test_answers_that_were_written_before(tmp_path, hf_lossy, skip_special_tokens, new_tokens):
    """With or without the end token in the text, and what follows it; one that was cut off gets none."""
    models, problems = hla.demo.load(), hla.demo.problems(3, 0, "calibration")
    collect, rows = ("collect", "--for", "eagle3", "--max-new-tokens", new_tokens, "--out"), []
    hf_lossy(*collect, tmp_path / "texts", "--limit", 3)
    texts = TextDataset(tmp_path / "texts", models.target)
    for ids, begin, problem in zip(texts.ids, texts.prompts, problems, strict=True):
        answer = models.tokenizer.decode(ids[begin:], skip_special_tokens=skip_special_tokens)
        rows.append(json.dumps({"prompt": problem.prompt, "continuation": answer + "\n" * answer.endswith("<eos>")}))
    assert all((ids[-1] == models.tokenizer.eos_token_id) == (new_tokens == 60) for ids in texts.ids)
    (file := tmp_path / "log.jsonl").write_text("\n".join(rows))
    hf_lossy(*collect, tmp_path / "read", "--prompts", file, "--written")
    read = TextDataset(tmp_path / "read", models.target)
    assert read.prompts == texts.prompts and all(a.equal(b) for a, b in zip(read.ids, texts.ids, strict=True))
    for row in ({"question": "Tom", "answer": "a person's"}, {"conversations": TALK}):
        file.write_text(json.dumps(row))
        assert "1 has no answer of the" in hf_lossy(*collect, tmp_path / "no", "--prompts", file, "--written").line


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", ["", "</s>"])  # in another answer: then one without was cut off
def test_written_answers_of_each_kind_of_tokenizer(tmp_path, kind, end):
    tokenizer, target = build_tokenizer(kind), small.llama()
    target.generation_config.eos_token_id = last = tokenizer.eos_token_id
    given = (target, tokenizer, [f"The{STOP}", "The"], tmp_path / "texts", TextSettings(layers=(0, 1)))
    read = TextDataset(collect_texts(*given, written=[f"is{end}", " is"]), target)
    whole = [tokenizer(f"The{STOP}is").input_ids + [last], tokenizer("The is").input_ids + [last] * (not end)]
    assert [ids.tolist() for ids in read.ids] == whole


def test_stored_states_of_other_texts_are_read_again(target, data, tmp_path):
    one, other = TextDataset(data, target, 60), TextDataset(data, target, 60)
    one.ids.reverse()
    for texts, longest in ((one, 9), (one, 100), (other, 100)):
        texts.store_in(tmp_path, longest)
        texts.batch([0], longest)
        assert texts.batch([0], longest).ids[0].equal(texts.ids[0][:longest])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle3", "vanilla", "rnn"])
def test_what_is_trained_is_what_is_drafted(target, data, monkeypatch, kind):
    """At every place, blocks in parts of few: the same tokens are right, and the loss is that of the same logits and of the confidence."""
    monkeypatch.setattr(module, "BLOCKS", 5)
    texts, common = TextDataset(data, target, 60), {"vocabulary": 50, "intermediate_size": 48, "seed": 3}
    if kind == "eagle3":
        network = make_network(target, texts, DrafterFitSettings(layers=2, **common))
    else:
        network = make_dspark_network(target, texts, DSparkFitSettings(steps=3, rank=8, markov=kind, **common))
    for weight in network.parameters():  # so that it is sometimes right, and all it reads matters
        if weight.dim() > 1 and weight is not network.lm_head.weight:
            torch.nn.init.normal_(weight, std=0.2)
    embedding, numbers, steps = target.get_input_embeddings(), [0, 5, 11], 3
    batch = texts.batch(numbers, 100)
    results = list((unroll if kind == "eagle3" else unroll_blocks)(network, embedding, batch, steps))
    tried, right, loss, places = (torch.zeros(steps, dtype=torch.float64) for _ in range(4))
    for row, number in enumerate(numbers):
        ids, length, prompt = texts.ids[number], len(texts.ids[number]), texts.prompts[number]
        for place in range(prompt - 2, length - 2):  # the first pair of a chain or a block embeds token place + 1
            model = HiddenStateModel(network, embedding, network.lm_head, 1, 100, network.config.layer.vocab_size)
            model.take(batch.states[row : row + 1, : place + 1].float(), [place + 1])
            model.read(ids[None, : place + 2])
            alive = True
            for step in range(min(steps, length - 2 - place)):
                logits = model.step(ids[None, place + step + 1 : place + step + 2])[0]
                wanted, at = int(ids[place + step + 2]), place + step + 1
                p = torch.zeros(len(logits)).scatter_(0, batch.likely[row, at], batch.probs[row, at])
                p, q = p[network.target_ids], logits[network.target_ids].log_softmax(-1)
                loss[step] -= (p * q).sum()
                places[step] += 1
                tried[step] += alive
                alive = alive and int(logits.argmax()) == wanted
                right[step] += alive
    for step, result in enumerate(results):
        assert int(result.positions) == int(places[step])
        assert int(result.tried.sum()) == int(tried[step]) and int(result.right.sum()) == int(right[step])
        assert float(result.loss) == pytest.approx(float(loss[step]), rel=1e-4)
    assert len(results) == steps and right[0] < tried[0]
    assert right[0] > 0 or kind == "rnn"  # whose random blocks are never right here


@torch.no_grad()
def test_the_head_begins_as_the_targets_in_int8_too(target, data):
    texts, rounded = TextDataset(data, target, 60), quantised(copy.deepcopy(target))
    network = make_network(target, texts, SHORT)
    weight = target.get_output_embeddings().weight
    assert network.lm_head.weight.equal(weight[network.target_ids].float()) and len(network.target_ids) == 30
    found = make_network(rounded, texts, SHORT).lm_head.weight
    # A row has one scale, so that its numbers are off by half a step of its largest; the unit vectors are not rounded.
    torch.testing.assert_close(found, network.lm_head.weight, rtol=0, atol=float(weight.abs().max()) / 127)
    assert not found.equal(network.lm_head.weight)


@torch.no_grad()
def test_states_begin_as_those_of_the_last_layer_that_is_read(target, data):
    texts = TextDataset(data, target, 60)
    states = texts.batch([2], 100).states.float()[:, :-1]  # `generate` reads no token behind the last
    fused, last = make_network(target, texts, SHORT).fuse(states), states.chunk(3, dim=-1)[-1]
    assert torch.nn.functional.cosine_similarity(fused, last, dim=-1).min() > 0.9


@pytest.mark.full
def test_it_learns_and_the_calls_in_its_figures_are_those_of_generate(target, data, tmp_path):
    """Text by text, in a ragged batch, whose prompts have a forward of their own: so the first round has a draft."""
    settings = short(epochs=8, learning_rate=1e-2, held_out=0.4)
    drafter, report = fit_drafter(target, data, tmp_path / "drafter", settings)
    texts = TextDataset(data, target, 60)
    train, test = split_texts(texts, settings)
    given = target.get_input_embeddings(), texts, train, settings
    networks = (make_network(target, texts, settings).eval(), drafter.network)
    untrained, trained = (measure(network, *given).acceptance[0].value for network in networks)
    assert trained > untrained + 0.2 and report.texts == len(test)
    facts = json.loads((tmp_path / "drafter" / "fit.json").read_text())
    assert facts["tokens"] == texts.count_answered(train) and len(facts["acceptance"]) == settings.steps
    card = (tmp_path / "drafter" / "README.md").read_text()
    assert "Lossless" in card and f"{report.tokens_per_call.value:.2f}" in card
    prompts = [texts.ids[number][: texts.prompts[number]].tolist() for number in test]
    prompts.append([5, 6, 7, 8, 9])  # which makes it ragged
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    out = target.generate(
        ids, attention_mask=mask, assistant_model=hla.load_drafter(tmp_path / "drafter"), lossy_policy=hla.Constant(3), max_new_tokens=16, do_sample=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    rows = out.speculation.rows[: len(test)]
    assert max(row.num_accepted_draft_tokens for row in rows) > 0
    rounds, tokens = sum(row.num_spec_steps for row in rows), texts.count_answered(test)
    assert report.tokens_per_call.value == pytest.approx(tokens / rounds)


def test_accepted_tokens_of_texts_that_are_shorter_than_a_chain():
    def step(*right):
        right = torch.tensor([right], dtype=torch.bool)
        return ChainStep(torch.zeros(()), right.sum(), right, right)

    steps = [step(1, 0, 1), step(0, 1, 0), step(0, 0, 1), step(0, 0, 0), step(0, 0, 0)]
    assert count_accepted(steps).tolist() == [[3, 0, 1]]
    assert count_calls([3, 0, 1], -1, 2) == 2 and count_calls([0, 0, 1], 0, 2) == 3 and count_calls([0], 1, 0) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("steps", [3, 5])
def test_a_killed_run_goes_on_to_the_same_weights(target, data, tmp_path, monkeypatch, steps):
    fit_drafter(target, data, tmp_path / "whole", SHORT)
    original = torch.optim.AdamW.step
    seen = []

    def killed(self, *args, **kwargs):
        if len(seen) == steps:
            raise KeyboardInterrupt
        seen.append(1)
        return original(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            fit_drafter(target, data, tmp_path / "again", SHORT)
    assert not (tmp_path / "again").exists()
    refused(lambda: fit_drafter(target, data, tmp_path / "again", SHORT), "unfinished run: pass --resume")
    with pytest.raises(ValueError, match="made with learning_rate"):
        fit_drafter(target, data, tmp_path / "again", short(learning_rate=1e-4), resume=True)
    fit_drafter(target, data, tmp_path / "again", SHORT, resume=True)
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "again"))
    assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
    assert not (tmp_path / "again.partial").exists()


def test_the_target_reads_each_text_once_if_the_disk_has_room(target, data, tmp_path, monkeypatch, capsys):
    calls, usage, weights = [], shutil.disk_usage, []
    target.register_forward_hook(lambda *_: calls.append(1))
    for free in (usage(tmp_path).free, 100):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: usage(folder)._replace(free=free))
        calls.clear()
        fit_drafter(target, data, tmp_path / f"{free}", short(epochs=3))
        weights.append(load_file(tmp_path / f"{free}" / "model.safetensors"))
        again = "read again" in capsys.readouterr().out
        assert len(calls) == 1 + 20 + 2 * 16 * again and again == (free == 100)  # 4 of 20 are held out
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_what_cannot_be_trained_on(target, data, tmp_path):
    def refusal(data=data, target=target, **settings):
        with pytest.raises(ValueError) as error:
            fit_drafter(target, data, tmp_path / "out", short(**settings))
        assert "\n" not in str(error.value) and not list(tmp_path.glob("out*"))
        return str(error.value)

    assert "is no dataset of hf-lossy collect --for eagle3" in refusal(tmp_path)
    assert "was made for the target" in refusal(target=small.llama(layers=2))
    other = copy.deepcopy(target)
    with torch.no_grad():
        other.lm_head.weight.add_(0.1)
    assert "other weights under the same name" in refusal(target=other)
    prompts = [f"{prompt} w5 w6" for prompt in PROMPTS]
    long = collect_texts(target, small.tokenizer(), prompts, tmp_path / "texts", SETTINGS)
    assert "0 of 20 texts have a token of their answer" in refusal(long, longest=4)
    few = collect_texts(target, small.tokenizer(), PROMPTS[:4], tmp_path / "few", SETTINGS)
    assert "4 of 4 texts have a token of their answer among the first 1024; at least 8" in refusal(few)
    shard = few / "00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "00000.safetensors cannot be read" in refusal(few)
    with pytest.raises(ValueError, match="layer 9 is asked for"):
        collect_texts(target, small.tokenizer(), PROMPTS, tmp_path / "deep", TextSettings(layers=(0, 9)))
    assert not (tmp_path / "deep.partial").exists()


@pytest.mark.full
def test_a_target_in_half_precision(target, data, tmp_path):
    """The network is trained in float32 all the same; data of the target in float32 are only warned of."""
    half = copy.deepcopy(target).to(torch.bfloat16)
    with pytest.warns(UserWarning, match="target and this target may differ: 'float32' there, 'bfloat16' here"):
        fit_drafter(half, data, tmp_path / "other", short(epochs=1))
    assert json.loads((tmp_path / "other" / "fit.json").read_text())["dtype"] == "bfloat16"
    texts = collect_texts(half, small.tokenizer(), PROMPTS, tmp_path / "texts", SETTINGS)
    drafter, report = fit_drafter(half, texts, tmp_path / "drafter", short(epochs=1))
    assert drafter.dtype == torch.float32 and report.acceptance[0].value > 0
    settings = {"assistant_model": hla.load_drafter(tmp_path / "drafter"), "lossy_policy": "strict"}
    assert hla.enable(half).generate(torch.tensor([[3, 7, 11]]), **settings, max_new_tokens=8).shape[1] > 3


@pytest.mark.full
def test_places_that_no_draft_came_to(target, data, tmp_path, monkeypatch):
    """An untrained network, say: what was not measured is no number, and the record is JSON."""
    from hf_lossy_assist.methods.eagle3 import fit as module

    original, texts = module.measure, TextDataset(data, target, 60)
    never = torch.tensor(sorted(set(range(target.config.vocab_size)) - set(torch.cat(texts.ids).tolist())))

    def measure_none_right(network, *args):
        network.d2t.copy_(never[:30] - torch.arange(30))  # what it can propose the target never wrote
        return original(network, *args)

    monkeypatch.setattr(module, "measure", measure_none_right)
    _, report = fit_drafter(target, data, tmp_path / "out", short(epochs=1))
    assert report.acceptance[0].value == 0 and report.acceptance[1:] == (None, None)
    facts = json.loads((tmp_path / "out" / "fit.json").read_text(), parse_constant=pytest.fail)
    assert facts["acceptance"][1:] == [None, None]
    assert "no draft came to it" in (tmp_path / "out" / "README.md").read_text()


def test_wrong_settings_of_dspark():
    refused(lambda: DSparkFitSettings(markov="lstm"), "markov: expected one of vanilla, gated, rnn, got 'lstm'")
    for settings in ({"rank": 0}, {"rank": 10**6}, {"steps": 1}):
        refused(lambda settings=settings: DSparkFitSettings(**settings), next(iter(settings)))


# -- from the command line --------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:generate_many writes one text at a time")
def test_collect_fit_generate(hf_lossy, tmp_path):
    data = tmp_path / "texts"
    collect = ("collect", "--for", "eagle3", "--limit", 12, "--max-new-tokens", 8, "--out")
    done = hf_lossy(*collect, data)
    assert done.code == 0 and "answers to 12 prompts" in done.out
    named = ("--model", hla.demo.FOLDER / "target", "--prompts", prompts_file(tmp_path))
    assert hf_lossy(*collect, tmp_path / "named", *named).code == 0
    for kind, more in (("eagle3", ()), ("dspark", ("--rank", 4))):
        out = tmp_path / kind
        fit = ("fit", kind, data, *more, "--epochs", 1, "--steps", 2, "--intermediate-size", 32, "--out", out)
        done = hf_lossy(*fit)
        assert done.code == 0 and "tokens a call of the target on 4 held-out texts" in done.out
        assert json.loads((out / "config.json").read_text())["speculators_model_type"] == kind
        assert f"{out} exists" in hf_lossy(*fit).line
        assert hf_lossy("generate", "--drafter", out, "--policy", "svip", "--max-new-tokens", 8).code == 0
        assert type(hla.load_drafter(out)) is {"eagle3": hla.Eagle3Drafter, "dspark": hla.DSparkDrafter}[kind]


def test_refused_in_one_line(hf_lossy, tmp_path):
    for words, says in (
        ("collect --for eagle3 --assistant D --out {tmp}/x", "--for eagle3: the target alone answers"),
        ("collect --for eagle3 --lambda 1.2 --out {tmp}/x", "--lambda is for --for sprinter and specdec"),
        ("collect --for eagle3 --mix 0.1 --out {tmp}/x", "--mix is for --for specdec"),
        ("fit eagle3 {tmp} --out {tmp}/x", "is no dataset of hf-lossy collect --for eagle3"),
        ("generate --drafter {tmp}/nothing", "is neither a folder here nor"),
        ("generate --drafter {tmp}", "config.json cannot be read"),
    ):
        assert says in hf_lossy(*words.format(tmp=tmp_path).split()).line, words
    assert not list(tmp_path.iterdir())
