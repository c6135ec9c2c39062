"""A small Hub on loopback, in memory, for the real `huggingface_hub` client and Transformers: it speaks what they ask when
they create, read, write, tag and delete repositories, and knows private and gated ones. Cards are judged as on the Hub."""

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import uvicorn
import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from huggingface_hub.repocard_data import model_index_to_eval_results
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


LICENCES = {
    "apache-2.0", "mit", "openrail", "bsd-3-clause", "cc-by-4.0", "gpl-3.0", "llama3.1", "gemma", "unknown", "other",
}  # fmt: skip
REPO_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
LFS = (".safetensors", ".bin", ".pt", ".pth", ".gz", ".zip", ".npy", ".npz", ".parquet", ".gguf", ".onnx", ".png")


def card_problems(content: str) -> tuple[list[str], list[str]]:
    """The errors and the warnings of a README.md's metadata block, as the Hub judges a model card."""
    block = REGEX_YAML_BLOCK.search(content)
    if block is None:
        return [], ["empty or missing yaml metadata in repo card"]
    try:
        data, node = yaml.safe_load(block[2]), yaml.compose(block[2])
    except (yaml.YAMLError, TypeError, ValueError) as error:
        return [f"bad YAML in the metadata: {str(error).splitlines()[0]}"], []
    if not isinstance(data, dict):
        return ["the metadata must be a mapping"], []
    names = [key.value for key, _ in node.value]
    errors = [f'"{name}" stands there twice' for name in data if names.count(name) > 1]

    known = {"license": LICENCES.__contains__, "base_model": REPO_ID.fullmatch, "tags": len, "library_name": len}
    for name, right in known.items():
        if (value := data.get(name)) is not None:
            values = value if isinstance(value, list) and name != "library_name" else [value]
            if (name == "tags" and values is not value) or not all(isinstance(v, str) and right(v) for v in values):
                errors.append(f'"{name}" is not what the Hub takes: {value!r}')
    try:
        if data.get("model-index") is not None:
            model_index_to_eval_results(data["model-index"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        errors.append(f'"model-index" has not the structure of a model index: {error!r}')
    return errors, []


@dataclass(frozen=True)
class File:
    """One version of one file."""

    data: bytes
    lfs: bool = False

    @property
    def etag(self) -> str:
        git = hashlib.sha1(b"blob %d\0" % len(self.data) + self.data)
        return (hashlib.sha256(self.data) if self.lfs else git).hexdigest()

    def listed(self, path: str) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "rfilename": path, "size": len(self.data), "oid": self.etag[:40]}
        lfs = {"oid": self.etag, "sha256": self.etag, "size": len(self.data), "pointerSize": 134}
        return entry | {"blobId": self.etag[:40]} | ({"lfs": lfs} if self.lfs else {})


@dataclass
class Repo:
    """Every commit as a whole tree; branches and tags are names for commits."""

    id: str
    url: str
    private: bool
    allowed: set[str] | None = None  # None: not gated; else the users who were let in
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    names: dict[str, dict[str, str]] = field(default_factory=lambda: {"branch": {}, "tag": {}})

    def commit(self, branch: str, files: dict[str, File]) -> str:
        oid = hashlib.sha1(repr((self.id, len(self.commits), files)).encode()).hexdigest()
        self.commits[oid], self.names["branch"][branch] = files, oid
        return oid

    def find(self, revision: str) -> str:
        return self.names["branch"].get(revision) or self.names["tag"].get(revision) or revision


class Refused(Exception):
    """An answer that the client turns into one of its exceptions, by status and code."""

    def __init__(self, status: int, message: str, code: str | None = None, **more: Any):
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer = JSONResponse({"error": message} | more, status, headers)


@dataclass
class Ask:
    """A request, read: who asks, the body, and (where the path names a repository) the revision of it."""

    user: str | None
    path: dict[str, str]
    body: bytes
    repo: Any = None
    oid: str = ""
    files: Any = None

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"{}")

    def owns(self, repo_id: str) -> bool:
        return self.user == ("other" if repo_id.startswith("other/") else "tester")


class HubServer:
    """`with HubServer() as hub`: `hub.url` answers until the block ends; each server starts empty. `token` may write everywhere
    but in `other/…`, `other_token` only there."""

    token, other_token = "hf_" + "w" * 34, "hf_" + "o" * 34
    users = {token: "tester", other_token: "other"}

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []

    def __enter__(self) -> "HubServer":
        self._routes = self._table()
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        config = uvicorn.Config(self._app, interface="asgi3", log_level="error", lifespan="off", ws="none", http="h11")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = True
        self._thread.join(10)

    def gate(self, repo_id: str, allow: Iterable[str] = (), repo_type: str = "model") -> None:
        """Only the owner and these tokens may read the files from now on."""
        self.repos[f"{repo_type}s", repo_id].allowed = {self.users[token] for token in allow}

    def files(self, repo_id: str, revision: str = "main", repo_type: str = "model") -> dict[str, bytes]:
        """Return the bytes of a revision's files, by path."""
        repo = self.repos[f"{repo_type}s", repo_id]
        return {path: file.data for path, file in repo.commits[repo.find(revision)].items()}

    def _table(self) -> Starlette:
        api, rev = "/api/{kind}/{org}/{name}", "{revision}"
        table: list[tuple] = [
            ("GET", "/api/whoami-v2", lambda ask: {"type": "user", "name": ask.user, "orgs": [], "auth": {}}),
            ("POST", "/api/validate-yaml", self._validate),
            ("POST", "/api/repos/create", self._create),
            ("GET", api, self._info),
            ("GET", f"{api}/revision/{rev}", self._info),
            ("GET", f"{api}/tree/{rev}", self._tree),
            ("POST", f"{api}/preupload/{rev}", self._preupload),
            ("POST", f"{api}/commit/{rev}", self._commit),
            ("POST", f"{api}/{{what}}/{rev}", self._label),
            ("PUT", "/lfs/{oid}", self._put),
        ]
        for repo in ("/{kind}/{org}/{name}", "/{org}/{name}"):  # a model's files have no prefix
            table += [("POST", f"{repo}.git/info/lfs/objects/batch", self._batch)]
            table += [("GET", f"{repo}/resolve/{rev}/{{path:path}}", self._resolve)]
        return Starlette(routes=[Route(path, self._route(call), methods=[how]) for how, path, call in table])

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        # Routes see the path as it was sent, because a revision such as refs/pr/1 comes as one quoted part.
        path = scope["raw_path"].decode()
        self.requests.append(f"{scope['method']} {unquote(path)}")
        await self._routes({**scope, "path": path}, receive, send)

    def _route(self, call: Callable[[Ask], Any]) -> Callable:
        async def answer(request: Request) -> Response:
            try:
                given = call(self._read(request, await request.body()))
                return given if isinstance(given, Response) else JSONResponse(given)
            except Refused as refused:
                return refused.answer

        return answer

    def _read(self, request: Request, body: bytes) -> Ask:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token and token not in self.users:
            raise Refused(401, "Invalid credentials in Authorization header")
        path = {name: unquote(value) for name, value in request.path_params.items()}
        ask = Ask(self.users.get(token), path, body)
        if ask.user is None and request.url.path.startswith(("/api/whoami", "/api/repos/")):
            raise Refused(401, "Invalid username or password.")
        if "name" not in path:
            return ask
        ask.repo = self.repos.get((path.get("kind", "models"), f"{path['org']}/{path['name']}"))
        if ask.repo is None or (ask.repo.private and not ask.owns(ask.repo.id)):
            raise Refused(404 if ask.user else 401, "Repository not found", "RepoNotFound")
        if request.method == "POST" and not ask.owns(ask.repo.id):
            raise Refused(403 if ask.user else 401, f"You have no right to write to {ask.repo.id}")
        ask.oid = ask.repo.find(path.setdefault("revision", "main"))
        ask.files = ask.repo.commits.get(ask.oid)
        if ask.files is None and path.get("what") != "branch":
            raise Refused(404, f"Invalid rev id: {path['revision']}", "RevisionNotFound")
        return ask

    def _validate(self, ask: Ask) -> Any:
        errors, warnings = ([{"message": text} for text in texts] for texts in card_problems(ask.json["content"]))
        return JSONResponse({"errors": errors, "warnings": warnings}, 400 if errors else 200)

    def _named(self, ask: Ask) -> tuple[str, str]:
        named = {"type": "model", "organization": ask.user} | {k: v for k, v in ask.json.items() if v is not None}
        key = f"{named['type']}s", f"{named['organization']}/{named['name']}"
        if not ask.owns(key[1]):
            raise Refused(403, f"You have no right to create or delete {key[1]}")
        return key

    def _create(self, ask: Ask) -> Any:
        if (key := self._named(ask)) in self.repos:
            raise Refused(409, f"You already created {key[1]}", url=self.repos[key].url)
        url = f"{self.url}/{key[1]}" if key[0] == "models" else f"{self.url}/{key[0]}/{key[1]}"
        private = bool(ask.json.get("private")) or ask.json.get("visibility") == "private"
        repo = self.repos[key] = Repo(key[1], url, private)
        repo.commit("main", {".gitattributes": File("".join(f"*{s} filter=lfs\n" for s in LFS).encode())})
        return {"url": url}

    def _info(self, ask: Ask) -> Any:
        block = REGEX_YAML_BLOCK.search(ask.files.get("README.md", File(b"")).data.decode())
        card = (yaml.safe_load(block[2]) if block else None) or {}
        info = {"_id": ask.oid, "id": ask.repo.id, "sha": ask.oid, "cardData": card, "tags": card.get("tags") or []}
        info |= {"private": ask.repo.private, "gated": "manual" if ask.repo.allowed is not None else False}
        return info | {"siblings": self._tree(ask)} | {n: card.get(n) for n in ("library_name", "pipeline_tag")}

    def _tree(self, ask: Ask) -> Any:
        return [file.listed(path) for path, file in sorted(ask.files.items())]

    def _label(self, ask: Ask) -> Any:
        """A tag (the path has the revision, the body the tag) or a branch (the other way round)."""
        name, source = ask.path["revision"], ask.json.get("startingPoint", "main")
        if ask.path["what"] == "tag":
            name, source = ask.json["tag"], name
        names, oid = ask.repo.names[ask.path["what"]], ask.repo.find(source)
        if name in names:
            raise Refused(409, f"{name} exists already")
        if oid not in ask.repo.commits:
            raise Refused(404, f"Invalid rev id: {source}", "RevisionNotFound")
        names[name] = oid

    def _resolve(self, ask: Ask) -> Any:
        if ask.repo.allowed is not None and not (ask.owns(ask.repo.id) or ask.user in ask.repo.allowed):
            raise Refused(403 if ask.user else 401, f"Access to {ask.repo.id} is restricted.", "GatedRepo")
        file, headers = ask.files.get(ask.path["path"]), {"X-Repo-Commit": ask.oid}
        if file is None:  # the client remembers that a file is missing only if it learns from which commit
            return Response("Entry not found", 404, headers | {"X-Error-Code": "EntryNotFound"})
        return Response(file.data, 200, headers | {"ETag": f'"{file.etag}"'}, "application/octet-stream")

    def _preupload(self, ask: Ask) -> Any:
        rows = [{"path": file["path"], "shouldIgnore": False} for file in ask.json["files"]]
        for row, file in zip(rows, ask.json["files"], strict=True):
            large = file["size"] > 10_000_000 or b"\0" in base64.b64decode(file["sample"])
            row["uploadMode"] = "lfs" if large or file["path"].endswith(LFS) else "regular"
            row["oid"] = ask.files[file["path"]].etag if file["path"] in ask.files else None
        return {"files": rows}

    def _batch(self, ask: Ask) -> Any:
        rows = [{"oid": part["oid"], "size": part["size"]} for part in ask.json["objects"]]
        for row in (row for row in rows if row["oid"] not in self.lfs):  # the others are there, and get no actions
            row["actions"] = {"upload": {"href": f"{self.url}/lfs/{row['oid']}"}}
        return {"transfer": "basic", "objects": rows}

    def _put(self, ask: Ask) -> Any:
        oid = hashlib.sha256(ask.body).hexdigest()
        if oid != ask.path["oid"]:
            raise Refused(403, "This is another object")
        self.lfs[oid] = ask.body

    def _commit(self, ask: Ask) -> Any:
        files, branch = dict(ask.files), ask.path["revision"]
        for entry in map(json.loads, ask.body.splitlines()):
            value, path = entry["value"], entry["value"].get("path", "")
            if entry["key"] == "header" and value.get("parentCommit", ask.oid) != ask.oid:
                raise Refused(412, "A commit has happened since")
            elif entry["key"] == "file":
                files[path] = File(base64.b64decode(value["content"]))
            elif entry["key"] == "lfsFile":
                files[path] = File(self.lfs[value["oid"]], lfs=True)
            elif entry["key"] in ("deletedFile", "deletedFolder"):
                files = {p: f for p, f in files.items() if p != path and not p.startswith(path.rstrip("/") + "/")}
        if branch not in ask.repo.names["branch"]:
            raise Refused(404, f"{branch} is not a branch", "RevisionNotFound")
        if "README.md" in files and (errors := card_problems(files["README.md"].data.decode())[0]):
            raise Refused(400, "; ".join(errors))
        oid = ask.repo.commit(branch, files)
        return {"success": True, "commitOid": oid, "commitUrl": f"{ask.repo.url}/commit/{oid}"}
