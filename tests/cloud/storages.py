"""Stand-ins for S3, Google Cloud Storage and Azure Blob Storage on loopback, which keep every request.

As far as obstore asks, and as strict as the services: a condition that does not hold is refused, names of
metadata on Azure are identifiers, a list comes in pages. Each delays and breaks what it is told:
`Storage.plan` is asked for each request. Names of faults:

    reset     the connection is reset before the answer
    broken    it is reset after half of the body
    500, 503  so it answers (503 as S3 does: SlowDown)
    stall     half of the body comes, then nothing more
    flip      a bit of the body is another
    short     half of the body comes, and the answer says that this is all
    expired   403: the credentials have expired
    skew      403: the clocks differ
    gone      404
    silent    no answer, until the client hangs up
"""

import base64
import email.utils
import itertools
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape, unescape

FAULTS = ("reset", "broken", "500", "503", "stall", "flip", "short", "expired", "skew", "gone")  # and silent
_CODES = {
    "500": (500, "InternalError"),
    "503": (503, "SlowDown"),
    "expired": (403, "ExpiredToken"),
    "skew": (403, "RequestTimeTooSkewed"),
    "gone": (404, "NoSuchKey"),
}
_METADATA = {"s3": "x-amz-meta-", "gs": "x-goog-meta-", "az": "x-ms-meta-"}


@dataclass(frozen=True, slots=True)
class StorageRequest:
    """A request that came.

    Attributes:
        number: from 0.
        path: as it came, without its query.
        container, key: the bucket and the object, unquoted.
        headers: names are lower.
        range: as the header says, or empty.
    """

    number: int
    method: str
    path: str
    container: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    range: str


@dataclass(frozen=True, slots=True)
class Stored:
    """An object; `number` is its generation, and its etag in quotes."""

    content: bytes
    metadata: dict[str, str]
    number: int
    modified_s: float = field(default_factory=time.time)


class Storage:
    """What lies in it, what it was asked, and what it breaks.

    Attributes:
        buckets: that there are.
        objects: by (bucket, key).
        page_objects: of a list, in one answer.
        latency_s: before each answer.
        plan: the name of a fault for a request, or None.
        seen: all requests so far.
        faults: how often each came.
    """

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.endpoint = ""
        self.buckets: set[str] = set()
        self.objects: dict[tuple[str, str], Stored] = {}
        self.parts: dict[str, bytes] = {}
        self.begun: dict[str, dict[str, str]] = {}
        self.page_objects = 1000
        self.latency_s = 0.0
        self.plan: Callable[[StorageRequest], str | None] = lambda seen: None
        self.seen: list[StorageRequest] = []
        self.faults: Counter[str] = Counter()
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
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_BUCKET": "elsewhere",
                "AWS_EC2_METADATA_DISABLED": "true",
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
def run_storage(scheme: str) -> Iterator[Storage]:
    """A storage of the kind of s3://, gs:// or az:// that runs until the end of the block."""
    storage = Storage(scheme)
    with serve_http(_Handler, storage=storage) as storage.endpoint:
        yield storage


@contextmanager
def serve_http(handler: type[BaseHTTPRequestHandler], **attributes: object) -> Iterator[str]:
    """A server on loopback, until the end of the block: `http://127.0.0.1:PORT`."""
    server = _Server(("127.0.0.1", 0), type("Handler", (handler,), attributes))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that hung up
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """What reads and answers requests, and keeps no log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each answer waits 40 ms for an acknowledgement

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def answer(self, status: int, sent: bytes, headers: dict[str, str], length: int | None = None) -> None:
        """Send it; `length` is said instead of how long `sent` is."""
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(length or len(sent))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)


class _Handler(Handler):
    storage: Storage

    def _do(self) -> None:
        storage, body = self.storage, self.body()
        path, _, query = self.path.partition("?")
        container, _, key = path.removeprefix("/").partition("/")
        asked = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        how = unquote(container), unquote(key), asked, headers, headers.get("range", "")
        with storage.lock:
            request = StorageRequest(len(storage.seen), self.command, path, *how)
            storage.seen.append(request)
            fault = storage.plan(request)
            if fault:
                storage.faults[fault] += 1
        time.sleep(storage.latency_s)
        if fault == "reset":
            self._reset()
        elif fault == "silent":
            self._wait_until_the_client_hangs_up()
        elif fault in _CODES:
            self._send(_refused(*_CODES[fault]), None)
        elif request.container not in storage.buckets:
            self._send(_refused(404, "NoSuchBucket"), None)
        else:
            with storage.lock:
                answer: Answer = getattr(self, f"_{self.command.lower()}")(request, body)
            self._send(answer, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do

    def _get(self, request: StorageRequest, body: bytes) -> "Answer":
        if not request.key:
            return self._list(request)
        stored = self.storage.objects.get((request.container, request.key))
        if stored is None:
            return _refused(404, "NoSuchKey")
        if request.headers.get("if-match", f'"{stored.number}"') != f'"{stored.number}"':
            return _refused(412, "ConditionNotMet")
        content, status, headers = stored.content, 200, self._headers_of(stored)
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", request.range):
            start, stop = int(match[1]), min(int(match[2]) + 1, len(content))
            if start >= len(content):
                return _refused(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            content, status = content[start:stop], 206
        return status, content, headers

    _head = _get

    def _put(self, request: StorageRequest, body: bytes) -> "Answer":
        part = request.query.get("blockid") or request.query.get("partNumber")
        if not request.key:  # something of the bucket's own
            return 200, b"", {}
        if part is not None:
            self.storage.parts[f"{request.query.get('uploadId', '')} {part}"] = body
            return 201, b"", {"ETag": '"part"'}
        if request.query.get("comp") == "blocklist":
            names = re.findall(r"<Uncommitted>(.*?)</Uncommitted>", body.decode())
            body = b"".join(self.storage.parts.pop(f" {name}") for name in names)
        return self._store(request, body, request.headers)

    def _post(self, request: StorageRequest, body: bytes) -> "Answer":
        upload = request.query.get("uploadId", "")
        if "uploads" in request.query:
            upload = f"upload-{next(self.storage.numbers)}"
            self.storage.begun[upload] = request.headers
            said = f"<Bucket>b</Bucket><Key>k</Key><UploadId>{upload}</UploadId>"
            return _xml(f"<InitiateMultipartUploadResult>{said}</InitiateMultipartUploadResult>")
        if upload:
            numbers = sorted(map(int, re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())))
            content = b"".join(self.storage.parts.pop(f"{upload} {number}") for number in numbers)
            return self._store(request, content, self.storage.begun.pop(upload))
        if "delete" in request.query:
            keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body.decode())]
            for key in keys:
                self.storage.objects.pop((request.container, key), None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return _xml(f"<DeleteResult>{deleted}</DeleteResult>")
        return self._batch(body)

    def _delete(self, request: StorageRequest, body: bytes) -> "Answer":
        found = self.storage.objects.pop((request.container, request.key), None)
        return _refused(404, "NoSuchKey") if found is None else (204, b"", {})

    def _batch(self, body: bytes) -> "Answer":
        """Azure's: several requests in one, each answered in the order in which it came."""
        parts = []
        for number, path in enumerate(re.findall(r"^DELETE /(\S+) HTTP", body.decode(), re.MULTILINE)):
            container, _, key = path.partition("/")
            found = self.storage.objects.pop((unquote(container), unquote(key)), None)
            status = "404 Not Found\r\nx-ms-error-code: BlobNotFound" if found is None else "202 Accepted"
            head = f"Content-Type: application/http\r\nContent-ID: {number}"
            parts.append(f"--batch\r\n{head}\r\n\r\nHTTP/1.1 {status}\r\n\r\n")
        content = "".join(parts) + "--batch--\r\n"
        return 202, content.encode(), {"Content-Type": "multipart/mixed; boundary=batch"}

    def _store(self, request: StorageRequest, content: bytes, headers: dict[str, str]) -> "Answer":
        place = request.container, request.key
        there = self.storage.objects.get(place)
        conditions = (
            ("if-none-match", "*" if there is None else ""),
            ("if-match", f'"{there.number}"' if there else ""),
            ("x-goog-if-generation-match", str(there.number if there else 0)),
        )
        if any(request.headers.get(name, holds) != holds for name, holds in conditions):
            exists = self.storage.scheme == "az" and "if-none-match" in request.headers
            return _refused(409, "BlobAlreadyExists") if exists else _refused(412, "ConditionNotMet")
        prefix = _METADATA[self.storage.scheme]
        metadata = {name.removeprefix(prefix): v for name, v in headers.items() if name.startswith(prefix)}
        if self.storage.scheme == "az" and not all(map(str.isidentifier, metadata)):
            return _refused(400, "InvalidMetadata")
        stored = self.storage.objects[place] = Stored(content, metadata, next(self.storage.numbers))
        if request.method == "POST":
            etag = f"<ETag>&quot;{stored.number}&quot;</ETag>"
            _, said, named = _xml(f"<CompleteMultipartUploadResult>{etag}</CompleteMultipartUploadResult>")
            return 200, said, {**named, **self._headers_of(stored)}
        return 201 if self.storage.scheme == "az" else 200, b"", self._headers_of(stored)

    def _list(self, request: StorageRequest) -> "Answer":
        prefix, query, page = request.query.get("prefix", ""), request.query, self.storage.page_objects
        keys = sorted(k for c, k in self.storage.objects if c == request.container and k.startswith(prefix))
        start = int(query.get("continuation-token") or query.get("marker") or 0)
        more = str(start + page) if start + page < len(keys) else ""
        found = [(key, self.storage.objects[request.container, key]) for key in keys[start : start + page]]
        if self.storage.scheme == "az":
            blobs = "".join(
                f"<Blob><Name>{escape(key)}</Name><Properties>"
                f"<Last-Modified>{email.utils.formatdate(one.modified_s, usegmt=True)}</Last-Modified>"
                f'<Etag>"{one.number}"</Etag><Content-Length>{len(one.content)}</Content-Length>'
                f"<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
                for key, one in found
            )
            text = f"<Blobs>{blobs}</Blobs><NextMarker>{more}</NextMarker>"
            return _xml(f"<EnumerationResults>{text}</EnumerationResults>")
        contents = "".join(
            f'<Contents><Key>{escape(key)}</Key><Size>{len(one.content)}</Size><ETag>"{one.number}"</ETag>'
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(one.modified_s))}"
            f"</LastModified></Contents>"
            for key, one in found
        )
        token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
        return _xml(f"<ListBucketResult>{contents}{token}</ListBucketResult>")

    def _headers_of(self, stored: Stored) -> dict[str, str]:
        prefix = _METADATA[self.storage.scheme]
        headers = {f"{prefix}{name}": value for name, value in stored.metadata.items()}
        headers["ETag"] = f'"{stored.number}"'
        headers["Last-Modified"] = email.utils.formatdate(stored.modified_s, usegmt=True)
        if self.storage.scheme == "gs":
            headers["x-goog-generation"] = str(stored.number)
        return headers

    def _send(self, answer: "Answer", fault: str | None) -> None:
        status, content, headers = answer
        middle = len(content) // 2
        if content and fault == "flip":
            content = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
        if content and fault == "short":
            content = content[:middle]
        is_half = fault in ("broken", "stall")
        with suppress(BrokenPipeError, ConnectionResetError):
            self.answer(status, content[:middle] if is_half else content, headers, len(content))
            if fault == "stall":
                self._wait_until_the_client_hangs_up()
        if is_half:
            self._reset()

    def _wait_until_the_client_hangs_up(self) -> None:
        with suppress(OSError):
            self.connection.recv(1)
        self.close_connection = True

    def _reset(self) -> None:
        """Not closed in order: the client sees ECONNRESET."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


Answer = tuple[int, bytes, dict[str, str]]
"""Status, body, headers."""


def _refused(status: int, code: str) -> Answer:
    _, content, headers = _xml(f"<Error><Code>{code}</Code><Message>refused</Message></Error>")
    return status, content, headers


def _xml(text: str) -> Answer:
    content = f'<?xml version="1.0" encoding="utf-8"?>{text}'.encode()
    return 200, content, {"Content-Type": "application/xml"}
