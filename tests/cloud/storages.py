"""Stand-ins for S3, Google Cloud Storage and Azure Blob Storage on loopback, which record every request.

They answer the requests of obstore, and are as strict as the services: a condition that does not hold is
refused, names of metadata on Azure are identifiers, a list comes in pages. `Storage.plan` chooses the fault
of each request, if any. Names of faults:

    reset     the connection is reset before the answer
    broken    the connection is reset after half of the body
    500, 503  the answer has this status (503 is SlowDown, as of S3)
    stall     half of the body comes, then nothing more
    flip      a bit of the body is flipped
    short     half of the body comes, and the answer says that this is all
    expired   403: the credentials have expired
    skew      403: the clocks differ
    gone      404: no such object
    silent    there is no answer until the client hangs up
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

FAULTS = (
    "reset",
    "broken",
    "500",
    "503",
    "stall",
    "flip",
    "short",
    "expired",
    "skew",
    "gone",
)  # all but silent
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
    """A request that the storage has received.

    Attributes:
        number: its number among all requests, from 0.
        path: its path, quoted, without the query.
        container, key: the bucket and the object, unquoted.
        headers: the headers, by name in lower case.
        range: the header `range`, or empty.
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
    """An object in the storage; `number` is its generation, and in quotes its etag."""

    content: bytes
    metadata: dict[str, str]
    number: int
    modified_s: float = field(default_factory=time.time)


class Storage:
    """State of a storage: its objects, the requests that it has received, and the faults to answer with.

    Attributes:
        buckets: names of the buckets.
        objects: the objects, by (bucket, key).
        page_objects: entries of one answer to a request for a list.
        latency_s: delay before each answer.
        plan: returns the name of a fault for a request, or None.
        seen: all requests so far.
        faults: number of faults so far, by name.
    """

    def __init__(self, scheme: str) -> None:
        self.scheme = scheme
        self.endpoint = ""
        self.buckets: set[str] = set()
        self.objects: dict[tuple[str, str], Stored] = {}
        self.parts: dict[str, bytes] = {}
        self.uploads: dict[str, dict[str, str]] = {}  # headers of unfinished multipart uploads, by id
        self.page_objects = 1000
        self.latency_s = 0.0
        self.plan: Callable[[StorageRequest], str | None] = lambda seen: None
        self.seen: list[StorageRequest] = []
        self.faults: Counter[str] = Counter()
        self.numbers = itertools.count(1)
        self.lock = threading.Lock()

    def environment(self) -> dict[str, str]:
        """Environment variables of its endpoint, of credentials, and of another bucket, to be ignored."""
        variables = {
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
        }
        return variables[self.scheme]


@contextmanager
def run_storage(scheme: str) -> Iterator[Storage]:
    """Run a storage of the kind of s3://, gs:// or az:// until the end of the block."""
    storage = Storage(scheme)
    with serve_http(_StorageHandler, storage=storage) as storage.endpoint:
        yield storage


@contextmanager
def serve_http(handler: type[BaseHTTPRequestHandler], **attributes: object) -> Iterator[str]:
    """Run a server on loopback until the end of the block, and yield its URL, http://127.0.0.1:PORT.

    Args:
        handler: class whose subclass with these `attributes` answers the requests.
    """
    server = _QuietServer(("127.0.0.1", 0), type("Handler", (handler,), attributes))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the client has hung up
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers requests, and keeps no log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise each answer waits 40 ms for an acknowledgement

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("content-length") or 0))

    def answer(self, status: int, sent: bytes, headers: dict[str, str], length: int | None = None) -> None:
        """Send an answer with the body `sent`; its header claims `length` bytes, where that is given."""
        self.send_response_only(status)
        for name, value in {**headers, "Content-Length": str(length or len(sent))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(sent)


class _StorageHandler(Handler):
    """Answers requests as the service of `storage` does, or with a fault of its plan."""

    storage: Storage

    def _do(self) -> None:
        storage, body = self.storage, self.body()
        path, _, query = self.path.partition("?")
        container, _, key = path.removeprefix("/").partition("/")
        parameters = {name: values[-1] for name, values in parse_qs(query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        with storage.lock:
            request = StorageRequest(
                number=len(storage.seen),
                method=self.command,
                path=path,
                container=unquote(container),
                key=unquote(key),
                query=parameters,
                headers=headers,
                range=headers.get("range", ""),
            )
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
            self._send(_refusal(*_CODES[fault]), None)
        elif request.container not in storage.buckets:
            self._send(_refusal(404, "NoSuchBucket"), None)
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
            return _refusal(404, "NoSuchKey")
        if request.headers.get("if-match", f'"{stored.number}"') != f'"{stored.number}"':
            return _refusal(412, "ConditionNotMet")
        content, status, headers = stored.content, 200, self._headers_of(stored)
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", request.range):
            start, stop = int(match[1]), min(int(match[2]) + 1, len(content))
            if start >= len(content):
                return _refusal(416, "InvalidRange")
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
            content, status = content[start:stop], 206
        return status, content, headers

    _head = _get

    def _put(self, request: StorageRequest, body: bytes) -> "Answer":
        part = request.query.get("blockid") or request.query.get("partNumber")
        if not request.key:  # the bucket itself
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
            self.storage.uploads[upload] = request.headers
            result = f"<Bucket>b</Bucket><Key>k</Key><UploadId>{upload}</UploadId>"
            return _xml(f"<InitiateMultipartUploadResult>{result}</InitiateMultipartUploadResult>")
        if upload:
            numbers = sorted(map(int, re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())))
            content = b"".join(self.storage.parts.pop(f"{upload} {number}") for number in numbers)
            return self._store(request, content, self.storage.uploads.pop(upload))
        if "delete" in request.query:
            keys = [unescape(key) for key in re.findall(r"<Key>(.*?)</Key>", body.decode())]
            for key in keys:
                self.storage.objects.pop((request.container, key), None)
            deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            return _xml(f"<DeleteResult>{deleted}</DeleteResult>")
        return self._batch(body)

    def _delete(self, request: StorageRequest, body: bytes) -> "Answer":
        if self.storage.objects.pop((request.container, request.key), None) is None:
            return _refusal(404, "NoSuchKey")
        return 204, b"", {}

    def _batch(self, body: bytes) -> "Answer":
        """Answer a batch of Azure: several requests to delete in one, in their order."""
        parts = []
        for number, path in enumerate(re.findall(r"^DELETE /(\S+) HTTP", body.decode(), re.MULTILINE)):
            container, _, key = path.partition("/")
            deleted = self.storage.objects.pop((unquote(container), unquote(key)), None)
            status = "202 Accepted"
            if deleted is None:
                status = "404 Not Found\r\nx-ms-error-code: BlobNotFound"
            head = f"Content-Type: application/http\r\nContent-ID: {number}"
            parts.append(f"--batch\r\n{head}\r\n\r\nHTTP/1.1 {status}\r\n\r\n")
        content = "".join(parts) + "--batch--\r\n"
        return 202, content.encode(), {"Content-Type": "multipart/mixed; boundary=batch"}

    def _store(self, request: StorageRequest, content: bytes, headers: dict[str, str]) -> "Answer":
        place = request.container, request.key
        existing = self.storage.objects.get(place)
        # Values of headers whose condition holds: an upload with another value is refused.
        conditions = (
            ("if-none-match", "*" if existing is None else ""),
            ("if-match", f'"{existing.number}"' if existing else ""),
            ("x-goog-if-generation-match", str(existing.number if existing else 0)),
        )
        if any(request.headers.get(name, required) != required for name, required in conditions):
            exists = self.storage.scheme == "az" and "if-none-match" in request.headers
            return _refusal(409, "BlobAlreadyExists") if exists else _refusal(412, "ConditionNotMet")
        prefix = _METADATA[self.storage.scheme]
        metadata = {name.removeprefix(prefix): v for name, v in headers.items() if name.startswith(prefix)}
        if self.storage.scheme == "az" and not all(map(str.isidentifier, metadata)):
            return _refusal(400, "InvalidMetadata")
        stored = self.storage.objects[place] = Stored(content, metadata, next(self.storage.numbers))
        if request.method == "POST":
            etag = f"<ETag>&quot;{stored.number}&quot;</ETag>"
            _, text, text_headers = _xml(
                f"<CompleteMultipartUploadResult>{etag}</CompleteMultipartUploadResult>"
            )
            return 200, text, {**text_headers, **self._headers_of(stored)}
        return 201 if self.storage.scheme == "az" else 200, b"", self._headers_of(stored)

    def _list(self, request: StorageRequest) -> "Answer":
        prefix, query, page = request.query.get("prefix", ""), request.query, self.storage.page_objects
        keys = sorted(k for c, k in self.storage.objects if c == request.container and k.startswith(prefix))
        start = int(query.get("continuation-token") or query.get("marker") or 0)
        more = str(start + page) if start + page < len(keys) else ""
        entries = [(key, self.storage.objects[request.container, key]) for key in keys[start : start + page]]
        if self.storage.scheme == "az":
            blobs = "".join(
                f"<Blob><Name>{escape(key)}</Name><Properties>"
                f"<Last-Modified>{email.utils.formatdate(stored.modified_s, usegmt=True)}</Last-Modified>"
                f'<Etag>"{stored.number}"</Etag><Content-Length>{len(stored.content)}</Content-Length>'
                f"<Content-Type>application/octet-stream</Content-Type></Properties></Blob>"
                for key, stored in entries
            )
            text = f"<Blobs>{blobs}</Blobs><NextMarker>{more}</NextMarker>"
            return _xml(f"<EnumerationResults>{text}</EnumerationResults>")
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(stored.content)}</Size>"
            f'<ETag>"{stored.number}"</ETag>'
            f"<LastModified>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(stored.modified_s))}"
            f"</LastModified></Contents>"
            for key, stored in entries
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
        """Reset the connection: the client sees ECONNRESET instead of an orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


Answer = tuple[int, bytes, dict[str, str]]
"""Status, body and headers of an answer."""


def _refusal(status: int, code: str) -> Answer:
    """Answer with an error of the service."""
    _, content, headers = _xml(f"<Error><Code>{code}</Code><Message>refused</Message></Error>")
    return status, content, headers


def _xml(text: str) -> Answer:
    """Answer with an XML document."""
    content = f'<?xml version="1.0" encoding="utf-8"?>{text}'.encode()
    return 200, content, {"Content-Type": "application/xml"}
