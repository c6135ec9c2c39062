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
from hf_lossy_assist import Head, HeadConfig, LinearHead, LossyPolicy, Sprinter, Staged, demo
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


def line(excinfo: pytest.ExceptionInfo) -> str:
    text = str(excinfo.value)
    assert "\n" not in text
    return text


@pytest.mark.nightly(every=3)
@pytest.mark.full(every=9)
@pytest.mark.parametrize(
    "name", ["ABS", "..", "../..", "../HEAD", "stop_head/../../HEAD", ".", "", "~/head", "C:\\head"]
)
def test_a_policy_takes_no_head_from_elsewhere_on_the_disk(hub, tmp_path, monkeypatch, name):
    linear().save_pretrained(tmp_path / "HEAD")
    monkeypatch.chdir(tmp_path)
    spec = with_head(str(tmp_path / "HEAD") if name == "ABS" else name)
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "policy.json").write_text(json.dumps(spec))
    for load in (LossyPolicy.from_pretrained, pull):
        with pytest.raises(ValueError, match="one of its own sub-folders or a repository on the Hub"):
            load(shared(spec))
    with pytest.raises(ValueError, match="one of its own sub-folders or a repository on the Hub") as error:
        LossyPolicy.from_pretrained(tmp_path / "policy")  # which may have been downloaded by other means
    line(error)


def test_what_the_user_writes_in_python_may_name_any_folder_here(tmp_path):
    linear().save_pretrained(tmp_path / "HEAD")
    spec = with_head(str(tmp_path / "HEAD"))
    for form in (spec, json.dumps(spec)):
        assert next(iter(as_policy(form).heads().values())).digest == linear().digest


def test_a_folder_here_does_not_stand_for_a_repository(hub, tmp_path, monkeypatch):
    linear().save_pretrained(tmp_path / "org" / "head")
    monkeypatch.chdir(tmp_path)
    for spec in (with_head("org/head"), {"filter": {"name": "staged", "companion": "org/head"}}):
        with pytest.raises(ValueError, match="'org/head' on the Hub, and a folder here has that name too") as error:
            LossyPolicy.from_pretrained(shared(spec))
        line(error)


def test_a_link_is_no_sub_folder(tmp_path):
    linear().save_pretrained(tmp_path / "elsewhere")
    Sprinter(linear()).save_pretrained(tmp_path / "policy")
    shutil.rmtree(tmp_path / "policy" / "stop_head")
    (tmp_path / "policy" / "stop_head").symlink_to(tmp_path / "elsewhere")
    refused(lambda: as_policy(tmp_path / "policy"), "stop_head is a link to another place")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_is_no_file_of_a_sub_folder(tmp_path, name):
    """A folder laid out like the Hub's cache changes nothing: there links lead to the blobs beside its snapshots, and only there."""
    linear().save_pretrained(tmp_path / "elsewhere")
    folder = tmp_path / "cache" / "snapshots" / "1"
    Sprinter(linear()).save_pretrained(folder)
    (tmp_path / "cache" / "blobs").symlink_to(tmp_path / "elsewhere")
    for goal in (tmp_path / "elsewhere" / name, Path("../../../blobs") / name):
        (folder / "stop_head" / name).unlink()
        (folder / "stop_head" / name).symlink_to(goal)
        with pytest.raises(ValueError, match=f"stop_head/{name} is a link to another place") as error:
            as_policy(folder)
        line(error)


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
    with pytest.raises(ValueError, match=r"a repository on the Hub.*from_pretrained\(…, companion=…\)") as error:
        as_policy(folder)
    line(error)
    for form in (policy.to_dict(), json.dumps(policy.to_dict())):  # which the user wrote
        assert as_policy(form).filter.companion == companion
    assert LossyPolicy.from_pretrained(folder, companion=companion).filter.companion == companion
    model = demo.load().companion
    assert LossyPolicy.from_pretrained(folder, companion=model).filter.companion is model
    LossyPolicy().save_pretrained(tmp_path / "strict")
    with pytest.raises(ValueError, match="no companion: leave companion=… out"):
        LossyPolicy.from_pretrained(tmp_path / "strict", companion=companion)
    with pytest.raises(ValueError, match="a repository on the Hub") as error:
        LossyPolicy.from_pretrained(shared(policy.to_dict()))
    line(error)
    before = len(hub.requests)
    for share in (lambda: policy.push_to_hub("org/mine"), lambda: push(tmp_path / "policy", "org/mine")):
        with pytest.raises(ValueError, match="a repository on the Hub"):
            share()
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


@pytest.mark.full(every=8)
@pytest.mark.parametrize(
    ("spoil", "says"),
    [(with_code, "code of its own, which is never run"), (with_pickle, "pickles are never loaded")],
    ids=["code", "pickle"],
)
@pytest.mark.parametrize("where", ["hub", "here"])
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
    with pytest.raises(OSError, match=says) as error:
        target.generate(
            **inputs, assistant_model=models.draft, max_new_tokens=4,
            lossy_policy=policy if where == "hub" else LossyPolicy(filter=Staged(name)),
        )  # fmt: skip
    assert name in line(error) and not canary.exists()
    with pytest.raises(OSError, match=says):
        load_model(name)
    if spoil is with_code:
        with pytest.raises(OSError, match=says):
            load_tokenizer(name)
    assert not canary.exists()


OURS = ("Head", "LossyPolicy", "Profile", "cls", "kind", "saved")  # of this package: safetensors and JSON alone


@pytest.mark.full
def test_whatever_transformers_loads_here_is_loaded_without_code_and_pickles():
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if (
                is_call and node.func.attr == "from_pretrained" and ast.unparse(node.func.value) != "SAVED[need]"
            ):  # this package's
                found.append(
                    (file.name, ast.unparse(node.func.value), {k.arg: ast.unparse(k.value) for k in node.keywords})
                )
    foreign = [row for row in found if row[1].removeprefix("hla.") not in OURS]
    assert {row[1] for row in foreign} == {"AutoModelForCausalLM", "AutoTokenizer"}
    for file, kind, given in foreign:
        assert given.get("trust_remote_code") == "False", file
        assert kind != "AutoModelForCausalLM" or given.get("use_safetensors") == "True", file
    assert all(issubclass(kind, (Head, LossyPolicy, hla.Profile)) for kind in (Head, LossyPolicy, hla.Profile))


@pytest.mark.full
def test_nothing_in_the_package_unpickles():
    """torch.load, pickle and their like; numpy's load can, too. Drafters' tensors are taken out of a pickle where the caller asks for it."""
    tensors_alone: list[ast.AST] = []
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            by_tensors_alone = (
                file.parent.name == "io" and isinstance(node, ast.Call) and "weights_only=True" in ast.unparse(node)
            )
            if by_tensors_alone and ast.unparse(node.func) == "torch.load":
                tensors_alone.append(node.func)  # type: ignore[union-attr]
            if isinstance(node, ast.Attribute) and not any(node is call for call in tensors_alone):
                assert ast.unparse(node) not in ("torch.load", "np.load", "numpy.load"), file
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                if (
                    file.name == "cluster.py"
                ):  # whose workers are processes of the job; Ray pickles what they return in any case
                    names = [name for name in names if name != "pickle"]
                assert not {"pickle", "joblib", "dill", "cloudpickle", "shelve", "marshal"} & set(names), file
    assert len(tensors_alone) == 1
