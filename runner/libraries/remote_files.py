"""Files at an address such as `s3://bucket/folder`, through `fsspec` and the package for its protocol."""

from __future__ import annotations

import functools
from typing import Any

from runner.failures.checks import refuse_if
from runner.failures.errors import wrong_argument
from runner.files.addresses import without_credentials
from runner.libraries.extras import how_to_install

LARGEST_LISTING = 50_000_000  # bytes


def check_address(name: str, address: str) -> None:
    """Check that the protocol of an address is supported, without connecting."""
    import fsspec  # 0.1 s

    shown = without_credentials(address)
    protocol, separator, path = address.partition("://")
    refuse_if(
        not separator or not path, name, shown, "must be an address, such as s3://bucket/runs or file:///shared/runs"
    )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        reason = f"{error}; {how_to_install('remote')} installs it for s3 and https"
        raise wrong_argument(name, shown, reason, ImportError) from error
    except ValueError as error:
        protocols = ", ".join(("s3", "gs", "abfs", "sftp", "file"))
        raise wrong_argument(name, shown, f"no such protocol; use {protocols}, or another one of fsspec") from error


def open_address(address: str) -> tuple[Any, str]:
    """Return the `fsspec.AbstractFileSystem` of an address, and the path on it without a trailing slash.

    Raises:
        Exception: the file system cannot be reached, or refuses the credentials.
    """
    import fsspec

    options = http_options() if address.startswith(("http://", "https://")) else {}
    files, path = fsspec.url_to_fs(address, **options)
    return files, path.rstrip("/")


def http_options(**client: Any) -> dict[str, Any]:
    """Return options that make fsspec's file system for HTTP read listings of bounded size.

    `client` are further arguments of `aiohttp.ClientSession`.
    """
    return {"client_kwargs": {**client, "response_class": _bounded_response()}}


@functools.cache  # fsspec reuses a file system if its options are equal
def _bounded_response() -> type[Any]:
    import aiohttp

    class BoundedResponse(aiohttp.ClientResponse):
        async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
            """Return the whole response, as fsspec expects of a listing."""
            content = bytearray()
            async for part in self.content.iter_chunked(1 << 16):
                content += part
                if len(content) > LARGEST_LISTING:
                    raise ValueError(f"the list of files has more than {LARGEST_LISTING:,} bytes")
            return content.decode(encoding or self.charset or "utf-8", errors)

    return BoundedResponse
