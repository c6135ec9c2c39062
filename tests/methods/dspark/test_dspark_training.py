"""Training a DSpark drafter: the blocks it learns are those that it drafts, and it learns."""

import pytest
import torch
from support import small
from support.refusals import refused

import hf_lossy_assist as hla
from hf_lossy_assist.drafters.networks.base import HiddenStateModel
from hf_lossy_assist.methods.drafter_settings import DSparkFitSettings
from hf_lossy_assist.methods.eagle3 import unrolled_loss as module
from hf_lossy_assist.methods.eagle3.collect import TextDataset, TextSettings, collect_texts
from hf_lossy_assist.methods.eagle3.initialise import make_dspark_network
from hf_lossy_assist.methods.eagle3.unrolled_loss import unroll_blocks


PROMPTS = [f"w{3 + i} w{7 + i % 5} w{11 + 2 * i}" for i in range(20)]
SHORT = DSparkFitSettings(
    steps=3, rank=8, epochs=2, batch_size=5, vocabulary=30, likely=60, save_every=3, held_out=0.2, intermediate_size=48
)


@pytest.fixture(scope="module")
def target():
    return hla.enable(small.llama(layers=3).float())


@pytest.fixture(scope="module")
def data(target, tmp_path_factory):
    settings = TextSettings(new_tokens=16, layers=(0, 1, 2), batch_size=20)
    return collect_texts(target, small.tokenizer(), PROMPTS, tmp_path_factory.mktemp("dspark") / "texts", settings)


@torch.no_grad()
@pytest.mark.parametrize("markov", ["vanilla", "rnn"])
def test_blocks_in_training_are_those_that_are_drafted(target, data, monkeypatch, markov):
    """At every place, in parts of few blocks: the same tokens are right, and the loss is that of the same logits and of the confidence."""
    monkeypatch.setattr(module, "BLOCKS", 5)
    texts = TextDataset(data, target, 60)
    network = make_dspark_network(
        target, texts, DSparkFitSettings(**vars(SHORT) | {"vocabulary": 50, "seed": 3, "markov": markov})
    )
    for weight in network.parameters():  # so that it is sometimes right, and all it reads matters
        if weight.dim() > 1 and weight is not network.lm_head.weight:
            torch.nn.init.normal_(weight, std=0.2)
    embedding, numbers, steps = target.get_input_embeddings(), [0, 5, 11], 3
    batch = texts.batch(numbers, 100)
    found = list(unroll_blocks(network, embedding, batch, steps))
    tried, right, loss, places = (torch.zeros(steps, dtype=torch.float64) for _ in range(4))
    ids_of = network.target_ids
    for row, number in enumerate(numbers):
        ids, length, prompt = texts.ids[number], len(texts.ids[number]), texts.prompts[number]
        for place in range(prompt - 2, length - 2):  # the block begins with token place + 1
            model = HiddenStateModel(network, embedding, network.lm_head, 1, 100, network.config.layer.vocab_size)
            model.take(batch.states[row : row + 1, : place + 1].float(), [place + 1])
            model.read(ids[None, : place + 2])
            alive = True
            for step in range(min(steps, length - 2 - place)):
                logits = model.step(ids[None, place + step + 1 : place + step + 2])[0]
                wanted, at = int(ids[place + step + 2]), place + step + 1
                p = torch.zeros(len(logits)).scatter_(0, batch.likely[row, at], batch.probs[row, at])[ids_of]
                q = logits[ids_of].log_softmax(-1)
                overlap, sure = torch.minimum(p, q.exp()).sum().clamp(max=1.0), model.confidence()[0, 0]
                loss[step] -= (p * q).sum() + overlap * sure.log() + (1 - overlap) * (1 - sure).log()
                places[step] += 1
                tried[step] += alive
                alive = alive and int(logits.argmax()) == wanted
                right[step] += alive
    for step in range(steps):
        assert int(found[step].positions) == int(places[step])
        assert int(found[step].tried.sum()) == int(tried[step]) and int(found[step].right.sum()) == int(right[step])
        assert float(found[step].loss) == pytest.approx(float(loss[step]), rel=1e-4)
    assert right[0] < tried[0] and (right[0] > 0 or markov == "rnn")  # whose random blocks are never right here


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:generate_many writes one text at a time")
def test_the_command(hf_lossy, tmp_path):
    data, out = tmp_path / "texts", tmp_path / "drafter"
    hf_lossy("collect", "--for", "eagle3", "--limit", "12", "--max-new-tokens", "16", "--out", str(data))
    done = hf_lossy("fit", "dspark", str(data), "--epochs", "1", "--steps", "2", "--rank", "4", "--intermediate-size", "32", "--out", str(out))  # fmt: skip
    assert done.code == 0 and "tokens a call of the target on 4 held-out texts" in done.out
    policy = '{"stop": {"name": "confidence", "threshold": 0.5, "reads": "head"}}'
    assert hf_lossy("generate", "--drafter", str(out), "--policy", policy, "--max-new-tokens", "8").code == 0
    assert isinstance(hla.load_drafter(out), hla.DSparkDrafter)


def test_wrong_settings():
    refused(lambda: DSparkFitSettings(markov="lstm"), "markov: expected one of vanilla, gated, rnn, got 'lstm'")
    for settings in ({"rank": 0}, {"rank": 10**6}, {"steps": 1}):
        refused(lambda settings=settings: DSparkFitSettings(**settings), next(iter(settings)))
