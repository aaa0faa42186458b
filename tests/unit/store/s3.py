"""A real S3 server over HTTP (moto), whose answers can be made to fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import s3fs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

from lightning_cpr.store import Storage

BUSY = b'<?xml version="1.0"?><Error><Code>ServiceUnavailable</Code><Message>Please try again.</Message></Error>'


class S3:
    """``fail``: called with (method, path) of each request; true makes it a 503. ``seen``: all requests."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self.fail: Callable[[str, str], bool] = lambda method, path: False
        self.seen: list[tuple[str, str]] = []
        self.url = ""

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        self.seen.append((method, path))
        if self.fail(method, path):
            start_response("503 Service Unavailable", [("Content-Type", "application/xml"), ("Connection", "close")])
            return [b"" if method == "HEAD" else BUSY]
        return self._app(environ, start_response)

    def options(self) -> dict[str, Any]:
        """storage_options of a client. botocore's own retries are off, so that ours are what is seen."""
        return {
            "key": "AKIATESTKEY",
            "secret": "test-secret",
            "client_kwargs": {"endpoint_url": self.url},
            "config_kwargs": {"retries": {"max_attempts": 0}},
        }

    def storage(self, root: str = "s3://bucket/job") -> Storage:
        return Storage(root, self.options())

    def keys(self) -> list[str]:
        """Every object in the bucket, as another client sees it."""
        fs = s3fs.S3FileSystem(**self.options(), skip_instance_cache=True, use_listings_cache=False)
        return sorted(path.removeprefix("bucket/") for path in fs.find("bucket"))


@contextmanager
def serve() -> Iterator[S3]:
    """A server with one empty bucket, ``bucket``."""
    s3 = S3(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, s3, threaded=True)
    s3.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="moto", daemon=True)
    thread.start()
    try:
        fs = s3fs.S3FileSystem(**s3.options(), skip_instance_cache=True)
        if fs.exists("bucket"):
            fs.rm("bucket", recursive=True)
        fs.mkdir("bucket")
        yield s3
    finally:
        server.shutdown()
        thread.join(20)
        server.server_close()
