"""From a run's URL to its store: ``file://``, ``memory://``, ``s3://``, ``gs://``, ``az://``."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from obstore import store as backends

from deltarefit.errors import RejectedError
from deltarefit.transport.base import Clock
from deltarefit.transport.stores import RunStore, StoreSettings

__all__ = ["open_run"]

_EXPECTED = "expected file:///directory, s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or memory://name"

_MEMORY: dict[str, Any] = {}
_MEMORY_LOCK = threading.Lock()


def open_run(
    url: str,
    *,
    clock: Clock,
    settings: StoreSettings | None = None,
    options: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    may_be_new: bool = True,
) -> RunStore:
    """Open the store of a run. Sends no request: a wrong bucket or key shows at the first use.

    Args:
        url: ``file:///directory`` (made if it is not there), ``s3://bucket/prefix``, ``gs://bucket/prefix``,
            ``az://container/prefix``, or ``memory://name``, which lives in this process under that name.
        clock: waits between tries.
        settings: part sizes, limits and timeouts.
        options: what the provider's client understands, e.g. ``endpoint``, ``region``, ``access_key_id``,
            ``secret_access_key``; they go before the environment.
        environment: where credentials and endpoint are looked up (``AWS_…``, ``GOOGLE_…``, ``AZURE_…``); the process's by
            default. Clients read the process's by themselves, so a given mapping only adds to it.
        may_be_new: make a directory that is not there. Who only looks at a run, or stops it, mistyped the URL then.

    Raises:
        RejectedError: the URL is of no known form, the client refuses the options, or a directory that must be there is not.
    """
    chosen = settings if settings is not None else StoreSettings()
    parts = _split(url)
    opener = _OPENERS.get(parts.scheme)
    if opener is None:
        raise RejectedError(f"run URL {url!r}: {_EXPECTED}")
    if parts.scheme == "file" and not may_be_new and not Path(unquote(parts.path)).is_dir():
        raise RejectedError(f"no run at {url}: there is no such directory; check the address, or start the trainer first")
    variables = os.environ if environment is None else environment
    try:
        backend, directory = opener(parts, chosen, dict(options or {}), variables)
    except RejectedError:
        raise
    except Exception as error:  # obstore raises several kinds here, among them bare ValueError and its own
        raise RejectedError(f"run URL {url!r}: {' '.join(str(error).split())[:500]}; {_EXPECTED}") from error
    return RunStore(url, backend, clock=clock, settings=chosen, directory=directory)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise RejectedError(f"run URL {url!r}: {error}; {_EXPECTED}") from error
    if parts.query or parts.fragment or parts.username or parts.password:
        raise RejectedError(
            f"run URL of scheme {parts.scheme!r}: it carries a query, a fragment or a password, which would end up in logs; "
            f"give credentials through the environment; {_EXPECTED}"
        )
    return parts


_Opened = tuple[Any, Path | None]


def _open_file(parts: SplitResult, settings: StoreSettings, options: dict[str, str], env: Mapping[str, str]) -> _Opened:
    del settings, env
    directory = Path(unquote(parts.path))
    if parts.netloc or not directory.is_absolute() or directory == Path("/") or options:
        raise RejectedError(f"run URL {parts.geturl()!r}: expected file:///absolute/directory, without options")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RejectedError(f"run directory {directory}: cannot be made: {error}") from error
    return backends.LocalStore(str(directory)), directory


def _open_memory(parts: SplitResult, settings: StoreSettings, options: dict[str, str], env: Mapping[str, str]) -> _Opened:
    del settings, options, env
    name = parts.netloc + parts.path
    with _MEMORY_LOCK:
        return _MEMORY.setdefault(name, backends.MemoryStore()), None


def _open_s3(parts: SplitResult, settings: StoreSettings, options: dict[str, str], env: Mapping[str, str]) -> _Opened:
    endpoint = (
        options.get("endpoint") or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or env.get("AWS_ENDPOINT")
    )
    client = _client(settings)
    if endpoint:
        options["endpoint"] = endpoint
        client["allow_http"] = endpoint.startswith("http://")
        # A server of one's own is seldom set up for bucket names as host names.
        options.setdefault("virtual_hosted_style_request", "false")
        options.setdefault("region", env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1")
    for option, variable in (("access_key_id", "AWS_ACCESS_KEY_ID"), ("secret_access_key", "AWS_SECRET_ACCESS_KEY")):
        if variable in env:
            options.setdefault(option, env[variable])
    return _open_bucket(backends.S3Store, parts, settings, options, client), None


def _open_gs(parts: SplitResult, settings: StoreSettings, options: dict[str, str], env: Mapping[str, str]) -> _Opened:
    del env
    return _open_bucket(backends.GCSStore, parts, settings, options, _client(settings)), None


def _open_az(parts: SplitResult, settings: StoreSettings, options: dict[str, str], env: Mapping[str, str]) -> _Opened:
    del env
    return _open_bucket(backends.AzureStore, parts, settings, options, _client(settings)), None


def _open_bucket(
    kind: Any, parts: SplitResult, settings: StoreSettings, options: dict[str, str], client: dict[str, Any]
) -> Any:
    if not parts.netloc:
        raise RejectedError(f"run URL {parts.geturl()!r}: it names no bucket; {_EXPECTED}")
    return kind(
        parts.netloc,
        prefix=unquote(parts.path).strip("/") or None,
        config=options,
        client_options=client,
        retry_config={
            "max_retries": settings.request_retries,
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
            "retry_timeout": timedelta(seconds=settings.request_timeout_s),
        },
    )


def _client(settings: StoreSettings) -> dict[str, Any]:
    return {
        "timeout": timedelta(seconds=settings.request_timeout_s),
        "read_timeout": timedelta(seconds=settings.read_timeout_s),
        "connect_timeout": timedelta(seconds=settings.connect_timeout_s),
    }


_OPENERS: Mapping[str, Callable[[SplitResult, StoreSettings, dict[str, str], Mapping[str, str]], _Opened]] = {
    "file": _open_file,
    "memory": _open_memory,
    "s3": _open_s3,
    "gs": _open_gs,
    "az": _open_az,
}
