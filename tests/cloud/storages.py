"""A stand-in for S3, Google Cloud Storage or Azure Blob Storage on loopback, which keeps every request.

As far as obstore asks, and as strict as the services: a condition that does not hold is refused, names of
metadata on Azure are identifiers, a list comes in pages. S3 proper is `tests.cloud.server`, by moto.
"""

import base64
import email.utils
import itertools
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

_PAGE = 2
_METADATA = {"s3": "x-amz-meta-", "gs": "x-goog-meta-", "az": "x-ms-meta-"}


@dataclass(frozen=True, slots=True)
class Request:
    """One that came: `container` is the bucket; that and `key` are unquoted, header names are lower."""

    method: str
    container: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Stored:
    """An object; `number` is its generation, and its etag in quotes."""

    content: bytes
    metadata: dict[str, str]
    number: int
    modified_s: float = field(default_factory=time.time)


class Storage:
    """What lies in it, by (bucket, key), and what it was asked."""

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.endpoint = ""
        self.objects: dict[tuple[str, str], Stored] = {}
        self.parts: dict[str, bytes] = {}
        self.begun: dict[str, dict[str, str]] = {}
        self.requests: list[Request] = []
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()

    def environment(self) -> dict[str, str]:
        """What leads to it, with credentials; and names of other buckets, which a URL comes before."""
        return {
            "s3": {
                "AWS_ENDPOINT_URL": self.endpoint,
                "AWS_ACCESS_KEY_ID": "somebody",
                "AWS_SECRET_ACCESS_KEY": "secret",
                "AWS_REGION": "us-east-1",
                "AWS_BUCKET": "elsewhere",
            },
            "gs": {
                "GOOGLE_BASE_URL": self.endpoint,
                "GOOGLE_BEARER_TOKEN": "secret",
                "GOOGLE_BUCKET": "elsewhere",
            },
            "az": {
                "AZURE_STORAGE_ENDPOINT": self.endpoint,
                "AZURE_STORAGE_ACCOUNT_NAME": "somebody-else",
                "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"secret").decode(),
                "AZURE_CONTAINER_NAME": "elsewhere",
            },
        }[self.scheme]


@contextmanager
def storing(scheme: str) -> Iterator[Storage]:
    """A storage of the kind of s3://, gs:// or az:// that runs until the end of the block."""
    storage = Storage(scheme)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"storage": storage}))
    server.daemon_threads = True
    storage.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield storage
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    storage: Storage
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path, _, query = self.path.partition("?")
        container, _, key = path.removeprefix("/").partition("/")
        asked = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, unquote(container), unquote(key), asked, headers)
        with self.storage.lock:
            self.storage.requests.append(request)
            getattr(self, f"_{self.command.lower()}")(request, body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do

    def _get(self, request: Request, body: bytes) -> None:
        if not request.key:
            self._list(request)
            return
        stored = self.storage.objects.get((request.container, request.key))
        if stored is None:
            self._refuse(404, "NoSuchKey")
        elif request.headers.get("if-match", f'"{stored.number}"') != f'"{stored.number}"':
            self._refuse(412, "ConditionNotMet")
        else:
            content, status, headers = stored.content, 200, self._headers_of(stored)
            if match := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", "")):
                start, stop = int(match[1]), min(int(match[2]) + 1, len(content))
                if start >= len(content):
                    self._refuse(416, "InvalidRange")
                    return
                headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
                content, status = content[start:stop], 206
            self._answer(status, content, headers)

    _head = _get

    def _put(self, request: Request, body: bytes) -> None:
        part = request.query.get("blockid") or request.query.get("partNumber")
        if part is not None:
            self.storage.parts[f"{request.query.get('uploadId', '')} {part}"] = body
            self._answer(201, b"", {"ETag": '"part"'})
        elif request.query.get("comp") == "blocklist":
            names = re.findall(r"<Uncommitted>(.*?)</Uncommitted>", body.decode())
            content = b"".join(self.storage.parts.pop(f" {name}") for name in names)
            self._store(request, content, request.headers)
        else:
            self._store(request, body, request.headers)

    def _post(self, request: Request, body: bytes) -> None:
        upload = request.query.get("uploadId", "")
        if "uploads" in request.query:
            upload = f"upload-{next(self.storage.numbers)}"
            self.storage.begun[upload] = request.headers
            said = f"<Bucket>b</Bucket><Key>k</Key><UploadId>{upload}</UploadId>"
            self._xml(f"<InitiateMultipartUploadResult>{said}</InitiateMultipartUploadResult>")
        elif upload:
            numbers = sorted(map(int, re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())))
            content = b"".join(self.storage.parts.pop(f"{upload} {number}") for number in numbers)
            self._store(request, content, self.storage.begun.pop(upload))
        elif "delete" in request.query:
            keys = [key.replace("&amp;", "&") for key in re.findall(r"<Key>(.*?)</Key>", body.decode())]
            for key in keys:
                self.storage.objects.pop((request.container, key), None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self._xml(f"<DeleteResult>{deleted}</DeleteResult>")
        else:
            self._batch(body)

    def _delete(self, request: Request, body: bytes) -> None:
        found = self.storage.objects.pop((request.container, request.key), None)
        if found is None:
            self._refuse(404, "NoSuchKey")
        else:
            self._answer(204, b"", {})

    def _batch(self, body: bytes) -> None:
        """Azure's: several requests in one, each answered in the order in which it came."""
        parts = []
        for number, path in enumerate(re.findall(r"^DELETE /(\S+) HTTP", body.decode(), re.MULTILINE)):
            container, _, key = path.partition("/")
            found = self.storage.objects.pop((unquote(container), unquote(key)), None)
            status = "404 Not Found\r\nx-ms-error-code: BlobNotFound" if found is None else "202 Accepted"
            head = f"Content-Type: application/http\r\nContent-ID: {number}"
            parts.append(f"--batch\r\n{head}\r\n\r\nHTTP/1.1 {status}\r\n\r\n")
        content = "".join(parts) + "--batch--\r\n"
        self._answer(202, content.encode(), {"Content-Type": "multipart/mixed; boundary=batch"})

    def _store(self, request: Request, content: bytes, headers: dict[str, str]) -> None:
        place = request.container, request.key
        there = self.storage.objects.get(place)
        conditions = (
            ("if-none-match", "*" if there is None else ""),
            ("if-match", f'"{there.number}"' if there else ""),
            ("x-goog-if-generation-match", str(there.number if there else 0)),
        )
        if any(request.headers.get(name, holds) != holds for name, holds in conditions):
            exists = self.storage.scheme == "az" and "if-none-match" in request.headers
            self._refuse(409, "BlobAlreadyExists") if exists else self._refuse(412, "ConditionNotMet")
            return
        prefix = _METADATA[self.storage.scheme]
        metadata = {name.removeprefix(prefix): v for name, v in headers.items() if name.startswith(prefix)}
        if self.storage.scheme == "az" and not all(map(str.isidentifier, metadata)):
            self._refuse(400, "InvalidMetadata")
            return
        stored = self.storage.objects[place] = Stored(content, metadata, next(self.storage.numbers))
        etag = f'"{stored.number}"'
        if request.method == "POST":
            text = f"<ETag>{escape(etag)}</ETag>"
            self._xml(f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>", stored)
        else:
            self._answer(201 if self.storage.scheme == "az" else 200, b"", self._headers_of(stored))

    def _list(self, request: Request) -> None:
        prefix, query = request.query.get("prefix", ""), request.query
        keys = sorted(k for c, k in self.storage.objects if c == request.container and k.startswith(prefix))
        start = int(query.get("continuation-token") or query.get("marker") or 0)
        more = str(start + _PAGE) if start + _PAGE < len(keys) else ""
        found = [(key, self.storage.objects[request.container, key]) for key in keys[start : start + _PAGE]]
        if self.storage.scheme == "az":
            blobs = "".join(
                f"<Blob><Name>{escape(key)}</Name><Properties>"
                f"<Last-Modified>{email.utils.formatdate(one.modified_s, usegmt=True)}</Last-Modified>"
                f'<Etag>"{one.number}"</Etag><Content-Length>{len(one.content)}</Content-Length>'
                f"<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
                for key, one in found
            )
            text = f"<Blobs>{blobs}</Blobs><NextMarker>{more}</NextMarker>"
            self._xml(f"<EnumerationResults>{text}</EnumerationResults>")
            return
        contents = "".join(
            f'<Contents><Key>{escape(key)}</Key><Size>{len(one.content)}</Size><ETag>"{one.number}"</ETag>'
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(one.modified_s))}"
            f"</LastModified></Contents>"
            for key, one in found
        )
        token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
        self._xml(f"<ListBucketResult>{contents}{token}</ListBucketResult>")

    def _headers_of(self, stored: Stored) -> dict[str, str]:
        prefix = _METADATA[self.storage.scheme]
        headers = {f"{prefix}{name}": value for name, value in stored.metadata.items()}
        headers["ETag"] = f'"{stored.number}"'
        headers["Last-Modified"] = email.utils.formatdate(stored.modified_s, usegmt=True)
        if self.storage.scheme == "gs":
            headers["x-goog-generation"] = str(stored.number)
        return headers

    def _refuse(self, status: int, code: str) -> None:
        self._xml(f"<Error><Code>{code}</Code><Message>refused</Message></Error>", status=status)

    def _xml(self, text: str, stored: Stored | None = None, status: int = 200) -> None:
        headers = {} if stored is None else self._headers_of(stored)
        content = f'<?xml version="1.0" encoding="utf-8"?>{text}'.encode()
        self._answer(status, content, {**headers, "Content-Type": "application/xml"})

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
