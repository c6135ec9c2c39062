"""Policies from elsewhere: what they name is theirs or on the Hub, code of theirs is never run and pickles are never read."""

import ast
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import create_repo, upload_file, upload_folder
from support.refusals import refused

import hf_lossy_assist as hla
from hf_lossy_assist import HeadConfig, LinearHead, LossyPolicy, Sprinter, Staged, demo
from hf_lossy_assist.artifacts.loading import load_model, load_tokenizer
from hf_lossy_assist.policy.parse import as_policy
from hf_lossy_assist.policy.sharing import pull, push


PACKAGE = Path(hla.__file__).parent


def linear() -> LinearHead:
    torch.manual_seed(0)
    return LinearHead(HeadConfig(4)).eval()


def shared(spec: dict, repo: str = "org/policy", token: str | None = None) -> str:
    """A repository with this policy.json."""
    create_repo(repo, exist_ok=True, private=token is not None)
    upload_file(repo_id=repo, path_or_fileobj=json.dumps(spec).encode(), path_in_repo="policy.json")
    return repo


def with_head(name: str) -> dict:
    return {"rule": "all_but_last", "stop": {"name": "any_of", "stops": ["svip", {"name": "head", "head": name}]}}


def test_a_policy_takes_no_head_from_elsewhere_on_the_disk(hub, tmp_path, monkeypatch):
    linear().save_pretrained(tmp_path / "HEAD")
    monkeypatch.chdir(tmp_path)
    says = "one of its own sub-folders or a repository on"
    names = (tmp_path / "HEAD", "..", "../..", "../HEAD", "stop_head/../../HEAD", ".", "", "~/head", "C:\\head")
    for name in map(str, names):
        (tmp_path / "policy").mkdir(exist_ok=True)
        (tmp_path / "policy" / "policy.json").write_text(json.dumps(with_head(name)))
        refused(lambda: LossyPolicy.from_pretrained(tmp_path / "policy"), says)  # it may have been downloaded somehow
    for load in (LossyPolicy.from_pretrained, pull):
        refused(lambda load=load: load(shared(with_head("../HEAD"))), says)
    linear().save_pretrained(tmp_path / "HEAD")
    spec = with_head(str(tmp_path / "HEAD"))
    for form in (spec, json.dumps(spec)):
        assert next(iter(as_policy(form).heads().values())).digest == linear().digest


def test_a_folder_here_does_not_stand_for_a_repository(hub, tmp_path, monkeypatch):
    linear().save_pretrained(tmp_path / "org" / "head")
    monkeypatch.chdir(tmp_path)
    for spec in (with_head("org/head"), {"filter": {"name": "staged", "companion": "org/head"}}):
        says = "'org/head' on the Hub, and a folder here has that name too"
        refused(lambda spec=spec: LossyPolicy.from_pretrained(shared(spec)), says)


def test_a_link_is_no_sub_folder_and_no_file_of_one(tmp_path):
    linear().save_pretrained(tmp_path / "elsewhere")
    Sprinter(linear()).save_pretrained(tmp_path / "policy")
    shutil.rmtree(tmp_path / "policy" / "stop_head")
    (tmp_path / "policy" / "stop_head").symlink_to(tmp_path / "elsewhere")
    refused(lambda: as_policy(tmp_path / "policy"), "stop_head is a link to another place")
    linear().save_pretrained(tmp_path / "elsewhere")
    folder = tmp_path / "cache" / "snapshots" / "1"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "blobs").symlink_to(tmp_path / "elsewhere")
    for name in ("config.json", "model.safetensors"):
        for goal in (tmp_path / "elsewhere" / name, Path("../../../blobs") / name):
            shutil.rmtree(folder, ignore_errors=True)
            Sprinter(linear()).save_pretrained(folder)
            (folder / "stop_head" / name).unlink()
            (folder / "stop_head" / name).symlink_to(goal)
            refused(lambda: as_policy(folder), f"stop_head/{name} is a link to another place")


@pytest.mark.full
def test_links_within_the_hubs_cache_are_followed(hub):
    Sprinter(linear()).push_to_hub("org/policy")
    folder = pull("org/policy")
    assert (folder / "stop_head" / "config.json").is_symlink()
    assert as_policy(folder) == Sprinter(linear())


def test_a_companion_on_this_disk_is_for_this_disk(hub, tmp_path):
    companion = str(demo.FOLDER / "companion")
    policy = LossyPolicy(filter=Staged(companion))
    policy.save_pretrained(tmp_path / "policy")
    folder = tmp_path / "policy"
    # The folder may come from anybody.
    refused(lambda: as_policy(folder), r"a repository on the Hub.*from_pretrained\(…, companion=…\)")
    for form in (policy.to_dict(), json.dumps(policy.to_dict())):  # which the user wrote
        assert as_policy(form).filter.companion == companion
    assert LossyPolicy.from_pretrained(folder, companion=companion).filter.companion == companion
    model = demo.load().companion
    assert LossyPolicy.from_pretrained(folder, companion=model).filter.companion is model
    LossyPolicy().save_pretrained(tmp_path / "strict")
    strict = tmp_path / "strict"
    refused(lambda: LossyPolicy.from_pretrained(strict, companion=companion), "no companion: leave companion=… out")
    refused(lambda: LossyPolicy.from_pretrained(shared(policy.to_dict())), "a repository on the Hub")
    before = len(hub.requests)
    for share in (lambda: policy.push_to_hub("org/mine"), lambda: push(folder, "org/mine")):
        refused(share, "a repository on the Hub")
    assert len(hub.requests) == before


@pytest.mark.full
def test_a_head_elsewhere_is_loaded_with_the_policys_arguments(hub, tmp_path, monkeypatch):
    linear().save_pretrained(tmp_path / "head")
    push(tmp_path / "head", "org/head", private=True)
    shared(with_head("org/head"), token=hub.token)
    monkeypatch.delenv("HF_TOKEN")
    policy = LossyPolicy.from_pretrained("org/policy", token=hub.token, revision="main")
    assert next(iter(policy.heads().values())).digest == linear().digest


# -- code and pickles -------------------------------------------------------------------------------------------------
@pytest.fixture
def canary(tmp_path):
    """A file that is there once something has run that should not."""
    return tmp_path / "ran"


def with_code(folder: Path, canary: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "own.py").write_text(f"open({str(canary)!r}, 'w')\n\nclass Own: pass\n")


class Mean:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def with_pickle(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Mean(canary)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("spoil", "says", "where"),
    [(with_code, "code of its own, which is never run", "hub"), (with_pickle, "pickles are never loaded", "here")],
    ids=["code", "pickle"],
)
def test_no_code_of_a_companion_is_run_and_no_pickle_read(hub, tmp_path, monkeypatch, canary, spoil, says, where):
    monkeypatch.setenv("DISABLE_SAFETENSORS_CONVERSION", "1")  # a service of the real Hub's
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is to be asked"))
    folder = Path(shutil.copytree(demo.FOLDER / "companion", tmp_path / "companion"))
    spoil(folder, canary)
    create_repo("org/companion")
    upload_folder(repo_id="org/companion", folder_path=folder)
    name = "org/companion" if where == "hub" else str(folder)
    policy = LossyPolicy.from_pretrained(shared({"filter": {"name": "staged", "companion": "org/companion"}}))
    models = demo.load()
    target = hla.enable(models.target)
    inputs = models.tokenizer("1 + 1", return_tensors="pt")
    settings = {"assistant_model": models.draft, "max_new_tokens": 4}
    settings["lossy_policy"] = policy if where == "hub" else LossyPolicy(filter=Staged(name))
    assert name in refused(lambda: target.generate(**inputs, **settings), says, OSError)
    for load in (load_model, load_tokenizer) if spoil is with_code else (load_model,):
        refused(lambda load=load: load(name), says, OSError)
    assert not canary.exists()


# Of this package: safetensors and JSON alone.
OURS = {"Head", "LossyPolicy", "Profile", "cls", "kind", "saved", "SAVED[need]"}
UNPICKLING = {"pickle", "joblib", "dill", "cloudpickle", "shelve", "marshal"}


@pytest.mark.full
def test_nothing_in_the_package_unpickles_or_runs_code_of_a_model():
    """torch.load, pickle and their like; numpy's load can, too. Drafters' tensors are taken out of a pickle where the caller asks for it."""
    foreign, loads = [], []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            kind = called.removesuffix(".from_pretrained").removeprefix("hla.")
            if called.endswith(".from_pretrained") and kind not in OURS:
                foreign.append((kind, {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}))
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "np.load", "numpy.load"):
                loads.append(file.parent.name)
            if called == "torch.load":
                assert "weights_only=True" in ast.unparse(node), file
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {getattr(node, "module", None) or "", *(alias.name for alias in node.names)}
                # Workers of cluster.py are processes of the job; Ray pickles what they return in any case.
                assert not UNPICKLING & names - ({"pickle"} if file.name == "cluster.py" else set()), file
    assert loads == ["io"] and {kind for kind, _ in foreign} == {"AutoModelForCausalLM", "AutoTokenizer"}
    for kind, given in foreign:
        assert given.get("trust_remote_code") == "False", kind
        assert kind != "AutoModelForCausalLM" or given.get("use_safetensors") == "True"
