"""An S3 endpoint of moto in a process of its own, and buckets in it."""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_SERVE = """
import logging, sys, threading
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until its parent is gone
"""


@dataclass(frozen=True, slots=True)
class Server:
    """Where it listens: `http://127.0.0.1:PORT`."""

    endpoint: str

    def make_bucket(self, name: str) -> None:
        """A new bucket, empty."""
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=10):
            pass


@contextmanager
def serving() -> Iterator[Server]:
    """A server that runs until the end of the block."""
    process = subprocess.Popen([sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        server = Server(f"http://127.0.0.1:{int(process.stdout.readline())}")
        for _ in range(100):
            with suppress(OSError), urllib.request.urlopen(server.endpoint, timeout=5):
                break
            time.sleep(0.05)
        yield server
    finally:
        process.kill()
        process.communicate()


def environment(endpoint: str) -> dict[str, str]:
    """What a user would set to work with a storage at `endpoint`."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": ",".join(filter(None, (os.environ.get("NO_PROXY"), "127.0.0.1"))),
    }
