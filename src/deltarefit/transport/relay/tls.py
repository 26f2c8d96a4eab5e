"""TLS 1.3 with certificates on both sides, from files."""

from __future__ import annotations

import os
import ssl
from pathlib import Path

from deltarefit.errors import RejectedError

__all__ = ["caller_tls", "listener_tls"]


def caller_tls(*, authority: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    """For whoever connects: checks that the relay's certificate comes from the authority and names the host it is called by.

    Args:
        authority: certificates of the authority that signed every participant's, PEM.
        certificate: this participant's own, with its chain, PEM.
        key: the private key of ``certificate``, PEM, without a password.

    Raises:
        RejectedError: a file is missing or is not what it must be.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, authority, certificate, key)


def listener_tls(*, authority: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    """For a relay: lets in only callers with a certificate from the authority. Arguments and errors as ``caller_tls``."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, authority, certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED
    return context


def _context(protocol: int, authority: Path, certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(os.fspath(authority))
        context.load_cert_chain(os.fspath(certificate), os.fspath(key), password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise RejectedError(
            f"TLS files {authority}, {certificate}, {key}: {error}; expected PEM files that belong together"
        ) from error
    return context
