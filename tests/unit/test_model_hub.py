"""Fetching from a server on this machine that plays the hub, or ModelScope: whole, broken off, gated, too big."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import pytest
import torch
from tests.cases.test_e20_names_and_layout_survive import random_tensors
from tests.tiny import tiny_model

from tercet.errors import InputError, TercetError
from tercet.spec.recipe import ModelSection
from tercet.weights import hub
from tercet.weights.hub import ensure_here, fetch
from tercet.weights.reading import load_model
from tercet.weights.writing import save_folder

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Server:
    """Plays both hubs for one repository, acme/tiny. `break_after` cuts the connection after so many bytes."""

    def __init__(self, files: dict[str, bytes]):
        self.files, self.requests, self.break_after = dict(files), [], None
        self.token, self.size_lie, self.elsewhere, self.told = None, {}, None, []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                server.answer(self, body=True)

            def do_HEAD(self):
                server.answer(self, body=False)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request, body):
        path = unquote(urlparse(request.path).path)
        self.requests.append((request.command, path, request.headers.get("Range")))
        self.told.append(request.headers.get("Authorization"))
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return self.send(request, 401, b"", {"X-Error-Code": "RepoNotFound"}, body)
        if path.startswith("/api/models/acme/tiny/tree/"):
            tree = [{"type": "file", "path": n, "size": len(c), "oid": "x"} for n, c in self.files.items()]
            return self.send(request, 200, json.dumps(tree).encode(), {"Content-Type": "application/json"}, body)
        if path.startswith("/api/models/acme/tiny"):
            siblings = [
                {"rfilename": n, "size": self.size_lie.get(n, len(c)), "blobId": "x", **self.large(n)}
                for n, c in self.files.items()
            ]
            info = {
                "id": "acme/tiny",
                "sha": COMMIT,
                "siblings": siblings,
                "tags": [],
                "private": False,
                "downloads": 0,
            }
            return self.send(request, 200, json.dumps(info).encode(), {"Content-Type": "application/json"}, body)
        if path == "/api/v1/models/acme/tiny/repo/files":
            listed = [
                {"Path": n, "Size": len(c), "Sha256": hashlib.sha256(c).hexdigest(), "Type": "blob"}
                for n, c in self.files.items()
            ]
            return self.send(request, 200, json.dumps({"Data": {"Files": listed}}).encode(), {}, body)
        for prefix in (
            f"/acme/tiny/resolve/{COMMIT}/",
            "/acme/tiny/resolve/main/",
            "/models/acme/tiny/resolve/master/",
        ):
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and name in self.files:
                return self.send_file(request, name, body)
        return self.send(request, 404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def large(self, name):
        """What the hub says of files that are not kept in git itself."""
        if not name.endswith(".safetensors"):
            return {}
        size, sha256 = len(self.files[name]), hashlib.sha256(self.files[name]).hexdigest()
        return {"lfs": {"sha256": sha256, "size": size, "pointerSize": 134}}

    def send_file(self, request, name, body):
        content = self.files[name]
        if self.elsewhere and name.endswith(".safetensors"):
            linked = {
                "X-Repo-Commit": COMMIT,
                "X-Linked-Size": str(len(content)),
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
            }
            return self.send(request, 302, b"", {"Location": self.elsewhere + request.path, **linked}, body)
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        status, begin = 200, 0
        wanted = request.headers.get("Range")
        if wanted:
            begin = int(wanted.removeprefix("bytes=").split("-")[0])
            status = 206
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self.send(request, status, content[begin:], headers, body)

    def send(self, request, status, content, headers, body):
        request.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        if not body:
            return
        if self.break_after is not None and len(content) > self.break_after:
            request.wfile.write(content[: self.break_after])
            request.wfile.flush()
            request.close_connection = True
            request.connection.shutdown(2)
            return
        request.wfile.write(content)


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Server]:
    spec = tiny_model(vocabulary=600, width=64, heads=4)
    save_folder(tmp_path / "source", spec, random_tensors(spec).items(), torch.float32, shard_bytes=200_000)
    files = {f.name: f.read_bytes() for f in (tmp_path / "source").iterdir()}
    found = Server(files)
    monkeypatch.setenv("HF_ENDPOINT", found.url)
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", found.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield found
    found.close()


def gets(server):
    return [
        (path.rpartition("/")[2], wanted)
        for verb, path, wanted in server.requests
        if verb == "GET" and "resolve" in path
    ]


@pytest.mark.parametrize("name", ["acme/tiny", "modelscope:acme/tiny"])
def test_fetched_whole_and_only_once(server, tmp_path, name):
    folder = fetch(name, output=tmp_path / "here")
    model = load_model(folder)
    expected = load_model(tmp_path / "source")
    assert all(torch.equal(p, expected.get_parameter(n)) for n, p in model.named_parameters())
    server.requests.clear()
    fetch(name, output=tmp_path / "here")
    assert not gets(server)


@pytest.mark.parametrize("name", ["acme/tiny", "modelscope:acme/tiny"])
def test_a_broken_download_goes_on_where_it_stopped(server, tmp_path, name):
    server.break_after = 50_000
    with pytest.raises(TercetError):
        fetch(name)
    server.break_after = None
    server.requests.clear()
    folder = fetch(name)
    ranges = [wanted for file, wanted in gets(server) if file.endswith(".safetensors") and wanted]
    assert ranges and all(wanted.startswith("bytes=") and wanted != "bytes=0-" for wanted in ranges)
    expected = load_model(tmp_path / "source")
    assert all(torch.equal(p, expected.get_parameter(n)) for n, p in load_model(folder).named_parameters())


def test_a_recipe_gets_its_model_by_name(server, tmp_path):
    section = ModelSection(path="modelscope:acme/tiny")
    said = []
    ensure_here(section, said.append)
    assert "fetching modelscope:acme/tiny" in said[0] and "468 KiB of 468 KiB" in said[-1]
    before = len(said)
    ensure_here(section, said.append)
    assert len(said) == before
    assert load_model("modelscope:acme/tiny").spec.width == 64


def test_config_alone_is_enough_to_plan(server, tmp_path):
    folder = fetch("acme/tiny", output=tmp_path / "here", only_config=True)
    assert (folder / "config.json").is_file()
    assert not list(folder.glob("*.safetensors"))


def test_the_disk_is_looked_at_first(server, tmp_path):
    server.size_lie = {n: 10**16 for n in server.files if n.endswith(".safetensors")}
    with pytest.raises(InputError, match=r"acme/tiny needs .* are free"):
        fetch("acme/tiny", output=tmp_path / "here")
    assert not gets(server)


def test_a_token_opens_a_private_model(server, tmp_path, monkeypatch):
    server.token = "hf_secret"
    with pytest.raises(InputError, match=r"no model 'acme/tiny' that you may read"):
        fetch("acme/tiny", output=tmp_path / "here")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (fetch("acme/tiny", output=tmp_path / "here") / "config.json").is_file()


def test_the_token_is_not_carried_to_another_host(server, tmp_path):
    other = Server(server.files)
    try:
        server.token, server.elsewhere = "secret", other.url
        folder = fetch("acme/tiny", output=tmp_path / "here", token="secret")
    finally:
        other.close()
    assert (folder / "model.safetensors.index.json").is_file() and gets(other)
    assert server.told and set(server.told) == {"Bearer secret"} and set(other.told) == {None}


def test_pickled_weights_want_to_be_asked_for(server, tmp_path):
    server.files = {n: c for n, c in server.files.items() if "safetensors" not in n}
    server.files["pytorch_model.bin"] = b"x" * 100
    with pytest.raises(InputError, match=r"pickled .bin weights only .*\n.*--import-bin"):
        fetch("acme/tiny", output=tmp_path / "here")
    assert (fetch("acme/tiny", output=tmp_path / "here", pickled=True) / "pytorch_model.bin").is_file()


def test_damage_on_the_way_is_noticed(server, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "file_sha256", lambda path: "0" * 64)
    with pytest.raises(TercetError, match="arrived damaged"):
        fetch("modelscope:acme/tiny", output=tmp_path / "here")


def test_an_unreachable_hub_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(TercetError, match=r"could not be fetched from http://127.0.0.1:9"):
        fetch("acme/tiny", output=tmp_path)
