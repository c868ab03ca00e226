"""A Hugging Face hub on this machine.

It answers as huggingface.co does what ``huggingface_hub`` asks when it downloads: the commit of a revision, the tree of
a commit in pages, files of git themselves, and for those of Git LFS a redirect to another host, where a signed address
and not the user's token gives access and ranges are served.
"""

import contextlib
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from hub_xet import reconstruction, xorb

LFS = (".safetensors", ".bin", ".pth", ".gguf")
TOKEN = "hf_of_somebody"
XET_TOKEN = "for Xet storage"
_PAGE = 5  # entries of a tree; a thousand on the real hub
_SIGNATURE = "Signature=secret"

Content = bytes | Path  # a Path for what is too large to be held and hashed: its hashes are of its name and size


@dataclass
class Repository:
    """A model: the files of each commit, and the branches and tags that name commits."""

    commits: dict[str, dict[str, Content]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False
    xet: bool = False  # whether large files lie in Xet storage, as those of most models do
    listed: list[dict[str, Any]] = field(default_factory=list)  # entries of the tree that no commit holds

    def commit(self, files: Mapping[str, Content], ref: str = "main") -> str:
        """Make a commit of ``files`` that ``ref`` names; return it."""
        digest = hashlib.sha1(repr(sorted((name, _sha256(data)) for name, data in files.items())).encode()).hexdigest()
        self.commits[digest] = dict(files)
        self.refs[ref] = digest
        return digest


def read(directory: Path) -> dict[str, Content]:
    """All files of a directory, those of many megabytes as paths."""
    files = {file.relative_to(directory).as_posix(): file for file in directory.rglob("*") if file.is_file()}
    return {name: file if file.stat().st_size > 1 << 26 else file.read_bytes() for name, file in files.items()}


@dataclass
class Asked:
    """A request, and how many bytes of content it got."""

    host: str
    method: str
    path: str
    range: str | None
    token: bool
    sent: int = 0


Answer = Callable[["_Handler"], None]


class Hub:
    """The hub. ``faults`` are answers to requests ``METHOD PATH`` that match a pattern, so many times each."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.swapped: dict[bytes, bytes] = {}  # content -> what is sent in its place, of the same size
        self.faults: list[tuple[re.Pattern[str], Answer, int]] = []
        self._lock = threading.Lock()
        self._servers = [self._serve("hub"), self._serve("cdn")]
        self.endpoint, self.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)

    def _serve(self, host: str) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self, "host": host}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return server

    def close(self) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, name: str, files: Path | Mapping[str, Content], ref: str = "main") -> Repository:
        """Put a directory's files, or ``files``, up as a commit of a model."""
        if isinstance(files, Path):
            files = read(files)
        repository = self.repositories.setdefault(name, Repository())
        repository.commit(files, ref)
        return repository

    def fail(self, pattern: str, answer: Answer, times: int = 1 << 30) -> None:
        """Answer the next ``times`` requests whose ``METHOD PATH`` contains ``pattern`` with ``answer``."""
        self.faults.append((re.compile(pattern), answer, times))

    def fault(self, line: str) -> Answer | None:
        with self._lock:
            for i, (pattern, answer, times) in enumerate(self.faults):
                if times and pattern.search(line):
                    self.faults[i] = (pattern, answer, times - 1)
                    return answer
        return None

    def sent(self, pattern: str = "") -> int:
        """Bytes of content that went out for paths that contain ``pattern``."""
        return sum(asked.sent for asked in self.asked if re.search(pattern, asked.path))

    def blob(self, digest: str) -> Content | None:
        for repository in self.repositories.values():
            for files in repository.commits.values():
                for data in files.values():
                    if _sha256(data) == digest:
                        return self.swapped.get(data, data) if isinstance(data, bytes) else data
        return None


def status(code: int, error_code: str | None = None, message: str = "no") -> Answer:
    """The answer of a hub that refuses or fails."""
    headers = {"X-Error-Message": message} | ({"X-Error-Code": error_code} if error_code else {})
    return lambda handler: handler.send(code, json.dumps({"error": message}).encode(), headers)


def content(data: bytes) -> Answer:
    """An answer of one's own."""
    return lambda handler: handler.send(200, data, {})


def cut(after: int, reset: bool = False) -> Answer:
    """The right answer, but the connection ends after so many bytes of content: closed, or reset."""

    def answer(handler: "_Handler") -> None:
        handler.cut, handler.reset = after, reset
        handler.reply()

    return answer


def slow(pieces: int, pause: float) -> Answer:
    """The right answer, in pieces with pauses."""

    def answer(handler: "_Handler") -> None:
        handler.pieces, handler.pause = pieces, pause
        handler.reply()

    return answer


def with_headers(**headers: str) -> Answer:
    """The right answer with other headers (``_`` stands for ``-``); an empty one is left out."""

    def answer(handler: "_Handler") -> None:
        handler.override = {name.replace("_", "-"): value for name, value in headers.items()}
        handler.reply()

    return answer


def no_ranges(handler: "_Handler") -> None:
    """The whole file, as of a server that knows no ranges."""
    del handler.headers["Range"]
    handler.reply()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    host: str
    cut: int | None = None
    reset = False
    pieces, pause = 1, 0.0
    override: Mapping[str, str] = {}

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        token = self.headers["Authorization"]
        self.asked = Asked(self.host, self.command, self.path, self.headers["Range"], TOKEN in (token or ""))
        self.known = token == f"Bearer {TOKEN}"
        self.hub.asked.append(self.asked)
        self.cut, self.reset, self.pieces, self.pause, self.override = None, False, 1, 0.0, {}
        answer = self.hub.fault(f"{self.command} {self.path}")
        with contextlib.suppress(ConnectionError):
            if answer is not None:
                answer(self)
            else:
                self.reply()

    do_HEAD = do_GET  # noqa: N815

    def reply(self) -> None:
        """Answer as the hub does."""
        url = urlsplit(self.path)
        if self.host == "cdn":
            return self._blob(url.path.strip("/"), url.query)
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|xet-read-token)/([^/]+))?", url.path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", url.path)
        found = api or file
        repository = self.hub.repositories.get(found[1]) if found else None
        if found is None or repository is None or (repository.private and not self.known):
            # Who is not logged in is not told whether there is such a repository.
            return self._error(
                404 if self.known else 401, "RepoNotFound" if self.known else None, "Repository not found"
            )
        revision = unquote((api[3] if api else file[2] if file else None) or "main")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            return self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if api and api[2] == "xet-read-token":
            told = {"X-Xet-Cas-Url": self.hub.cdn, "X-Xet-Access-Token": XET_TOKEN}
            return self.send(200, b"{}", told | {"X-Xet-Token-Expiration": str(int(time.time()) + 3600)})
        if api:
            return self._tree(repository, commit, url.query) if api[2] == "tree" else self._model(found[1], commit)
        assert file
        return self._file(repository, commit, unquote(file[3]))

    def _model(self, name: str, commit: str) -> None:
        files = [{"rfilename": file} for file in self.hub.repositories[name].commits[commit]]
        facts = {
            "_id": "0",
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": False,
            "siblings": files,
            "tags": [],
        }
        self.send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def _tree(self, repository: Repository, commit: str, query: str) -> None:
        entries = [_entry(name, data, repository.xet) for name, data in sorted(repository.commits[commit].items())]
        folders = {name.rpartition("/")[0] for name in repository.commits[commit] if "/" in name}
        entries += [
            {"type": "directory", "oid": _git(folder.encode()), "size": 0, "path": folder} for folder in folders
        ]
        entries += repository.listed
        start = int(parse_qs(query).get("cursor", ["0"])[0])
        headers = {"Content-Type": "application/json"}
        if start + _PAGE < len(entries):
            address = f"{self.hub.endpoint}{urlsplit(self.path).path}?recursive=true&cursor={start + _PAGE}"
            headers["Link"] = f'<{address}>; rel="next"'
        self.send(200, json.dumps(entries[start : start + _PAGE]).encode(), headers)

    def _file(self, repository: Repository, commit: str, name: str) -> None:
        headers = {"X-Repo-Commit": commit}
        if repository.gated and not self.known:
            return self._error(401, "GatedRepo", "Access to model is restricted. Please log in.", headers)
        data = repository.commits[commit].get(name)
        if data is None:
            return self._error(404, "EntryNotFound", "Entry not found", headers)
        if not name.endswith(LFS):
            return self.send(200, _piece(data, 0, _size(data)), headers | {"ETag": f'"{_git(data)}"'})
        digest = _sha256(data)
        headers |= {"X-Linked-Size": str(_size(data)), "X-Linked-ETag": f'"{digest}"', "ETag": f'"{_git(data)}"'}
        if repository.xet:
            route = f"{self.hub.endpoint}{self.path.partition('/resolve/')[0].replace('/', '/api/models/', 1)}"
            headers |= {"X-Xet-Hash": digest, "X-Xet-Refresh-Route": f"{route}/xet-read-token/{commit}"}
        where = f"{self.hub.cdn}/{digest}?{_SIGNATURE}&response-content-disposition={quote(name)}"
        return self.send(302, b"Found. Redirecting", headers | {"Location": where})

    def _blob(self, path: str, query: str) -> None:
        kind, _, digest = path.rpartition("/")
        data = self.hub.blob(digest)
        if kind == "v2/reconstructions":
            return self.send(404, b"", {})  # the older form says the same
        if kind == "v1/reconstructions" and data is not None:
            return self._reconstruction(digest, data)
        if kind == "xorbs" and data is not None:
            data = xorb(_piece(data, 0, _size(data)))
        if data is None or kind not in ("", "xorbs") or _SIGNATURE not in query:
            return self.send(403, b"<Error>AccessDenied</Error>", {})
        # Not the sha256 of the content, which only the hub's own answer has.
        headers = {"ETag": f'"{_sha256(digest.encode())}"', "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")
        if asked is None:
            return self.send(200, _piece(data, 0, _size(data)), headers)
        start, end = int(asked[1]), min(int(asked[2] or _size(data)), _size(data) - 1)
        if start >= _size(data):
            return self.send(416, b"", {"Content-Range": f"bytes */{_size(data)}"})
        headers["Content-Range"] = f"bytes {start}-{end}/{_size(data)}"
        return self.send(206, _piece(data, start, end + 1), headers)

    def _reconstruction(self, digest: str, data: Content) -> None:
        if self.headers["Authorization"] != f"Bearer {XET_TOKEN}":
            return self.send(401, b"", {})
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        start, stop = (int(asked[1]), min(int(asked[2]) + 1, _size(data))) if asked else (0, _size(data))
        if start >= _size(data):
            return self.send(416, b"", {})
        address = f"{self.hub.cdn}/xorbs/{digest}?{_SIGNATURE}"
        return self.send(200, reconstruction(digest, _size(data), start, stop, address), {})

    def _error(self, code: int, error_code: str | None, message: str, headers: dict[str, str] | None = None) -> None:
        told = (headers or {}) | {"X-Error-Message": message} | ({"X-Error-Code": error_code} if error_code else {})
        self.send(code, json.dumps({"error": message}).encode(), told)

    def send(self, code: int, data: bytes, headers: dict[str, str]) -> None:
        """Send an answer, or as much of it as a fault lets through."""
        self.send_response(code)
        for name, value in {"Content-Length": str(len(data)), **headers, **self.override}.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        rest = data if self.cut is None else data[: self.cut]
        size = -(-len(rest) // self.pieces) or 1
        for start in range(0, len(rest), size):
            self.wfile.write(rest[start : start + size])
            self.wfile.flush()
            self.asked.sent += len(rest[start : start + size])
            time.sleep(self.pause)
        if self.cut is not None:
            self.close_connection = True
            if self.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                (self.connection.close if self.reset else lambda: self.connection.shutdown(socket.SHUT_RDWR))()


def _entry(name: str, data: Content, xet: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "oid": _git(data), "size": _size(data), "path": name}
    if name.endswith(LFS):
        entry["lfs"] = {"oid": _sha256(data), "size": _size(data), "pointerSize": 134}
        entry |= {"xetHash": _sha256(data)} if xet else {}
    return entry


def _size(data: Content) -> int:
    return len(data) if isinstance(data, bytes) else data.stat().st_size


def _piece(data: Content, start: int, stop: int) -> bytes:
    if isinstance(data, bytes):
        return data[start:stop]
    with data.open("rb") as stream:
        stream.seek(start)
        return stream.read(stop - start)


def _hashed(data: Content) -> bytes:
    return data if isinstance(data, bytes) else f"{data.name} {_size(data)}".encode()


def _git(data: Content) -> str:
    return hashlib.sha1(b"blob %d\0" % _size(data) + _hashed(data)).hexdigest()


def _sha256(data: Content) -> str:
    return hashlib.sha256(_hashed(data)).hexdigest()


@contextlib.contextmanager
def running() -> Iterator[Hub]:
    """A hub that is there while the block runs."""
    hub = Hub()
    try:
        yield hub
    finally:
        hub.close()
