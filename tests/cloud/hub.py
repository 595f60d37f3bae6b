"""A stand-in for the HTTP interface of Hugging Face's dataset repositories, as far as huggingface_hub asks.

One branch, `main`. All files are large ones (LFS), whose bytes go elsewhere before the commit.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

from tests.cloud.storages import Handler, listening


class Hub:
    """What has been committed and sent.

    Attributes:
        repositories: name -> path -> bytes.
        private: name -> whether it was made so.
        blobs: SHA-256 -> bytes of large files, committed or not.
        uploads: of large files, so far.
        uploads_until_failure: how many are taken; None: all.
        commits: how many there were; the last one has this number in its name.
        silent: until it is set, nothing that is sent is answered; None: all is.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.silent: threading.Event | None = None
        self.blobs: dict[str, bytes] = {}
        self.uploads = 0
        self.uploads_until_failure: int | None = None
        self.commits = 0
        self.endpoint = ""

    @property
    def head(self) -> str:
        """The last commit."""
        return f"{self.commits:040x}"


@contextmanager
def hub_serving() -> Iterator[Hub]:
    """A hub that listens on loopback until the end of the block."""
    hub = Hub()
    with listening(_Handler, hub=hub) as hub.endpoint:
        yield hub


class _Handler(Handler):
    hub: Hub

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/main/?(.*)", path):
            self._tree(match[1], match[2])
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/revision/main)?", path):
            found = match[1] in self.hub.repositories
            self._json({"id": match[1], "sha": self.hub.head}) if found else self._missing("RepoNotFound")
        elif match := re.fullmatch(r"/datasets/([^/]+/[^/]+)/resolve/main/(.+)", path):
            self._file(match[1], match[2])
        else:
            self._missing("EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.body()
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.hub.repositories:
                url = f"{self.hub.endpoint}/datasets/{name}"
                self._json({"error": "You already created this dataset repo", "url": url}, 409)
                return
            self.hub.repositories[name] = {}
            self.hub.private[name] = asked.get("private", asked.get("visibility") == "private")
            self._json({"url": f"{self.hub.endpoint}/datasets/{name}"})
        elif re.fullmatch(r"/api/datasets/[^/]+/[^/]+/preupload/main", self.path):
            answer = {"uploadMode": "lfs", "shouldIgnore": False, "oid": None}
            self._json({"files": [{"path": file["path"], **answer} for file in json.loads(body)["files"]]})
        elif self.path.endswith(".git/info/lfs/objects/batch"):
            actions = list(map(self._upload_action, json.loads(body)["objects"]))
            self._json({"transfer": "basic", "objects": actions})
        elif match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/commit/main", self.path):
            self._commit(match[1], body)
        else:
            self._missing("RepoNotFound")

    def do_PUT(self) -> None:
        hub, body = self.hub, self.body()
        hub.uploads += 1
        if hub.silent is not None:
            hub.silent.wait()
        if hub.uploads_until_failure is not None and hub.uploads > hub.uploads_until_failure:
            self._json({"error": "no more"}, 400)
            return
        sha256 = hashlib.sha256(body).hexdigest()
        assert self.path == f"/blobs/{sha256}"
        hub.blobs[sha256] = body
        self._json({})

    def _upload_action(self, asked: dict[str, Any]) -> dict[str, Any]:
        known = asked["oid"] in self.hub.blobs
        action = {"actions": {"upload": {"href": f"{self.hub.endpoint}/blobs/{asked['oid']}"}}}
        return {**asked, **({} if known else action)}

    def _commit(self, name: str, body: bytes) -> None:
        files = self.hub.repositories[name]
        for line in body.splitlines():
            record = json.loads(line)
            value = record["value"]
            if value.get("parentCommit", self.hub.head) != self.hub.head:
                self._json({"error": "A commit has happened since. Please refresh and try again."}, 412)
                return
            if record["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        self.hub.commits += 1
        url = f"{self.hub.endpoint}/datasets/{name}/commit/{self.hub.head}"
        self._json({"commitUrl": url, "commitOid": self.hub.head, "pullRequestUrl": None})

    def _tree(self, name: str, folder: str) -> None:
        prefix = f"{folder}/" if folder else ""
        files = self.hub.repositories[name].items()
        found = {path: content for path, content in files if path.startswith(prefix)}
        if prefix and not found:
            self._missing("EntryNotFound")
            return
        entries = []
        for path, content in found.items():
            sha256 = hashlib.sha256(content).hexdigest()
            lfs = {"oid": sha256, "size": len(content), "pointerSize": 130}
            entries.append({"type": "file", "path": path, "size": len(content), "oid": "b" * 40, "lfs": lfs})
        self._json(entries)

    def _file(self, name: str, path: str) -> None:
        files = self.hub.repositories.get(name)
        if files is None or path not in files:
            self._missing("RepoNotFound" if files is None else "EntryNotFound")
            return
        sha256 = hashlib.sha256(files[path]).hexdigest()
        self.answer(200, files[path], {"ETag": f'"{sha256}"', "X-Repo-Commit": self.hub.head})

    def _missing(self, code: str) -> None:
        self.answer(404, b'{"error": "not found"}', {"X-Error-Code": code})

    def _json(self, content: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})
