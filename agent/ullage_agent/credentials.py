"""Certificate and token of the action port, reread when their files change.

A pair that cannot be loaded at the start ends the start; one that cannot be loaded later is logged and the old
one stays in force, so that a rotation caught half way does no harm.
"""

from __future__ import annotations

import hmac
import logging
import ssl
from pathlib import Path

from ullage_agent.errors import ConfigError
from ullage_agent.tlscheck import certificate_problem

log = logging.getLogger(__name__)

MIN_TOKEN_CHARS = 16

Stamp = tuple[int, int, int]


class Credentials:
    """The pair in force. `context` is live: a refreshed certificate serves the next connection."""

    def __init__(self, cert: Path, key: Path, token_file: Path) -> None:
        self._cert, self._key, self._token_file = cert, key, token_file
        self._seen = self._stamps()
        self._token = self._read_token()
        self.context = self._load_certificate()
        self.problem: str | None = None
        """Why clients refuse the certificate now, as when it has expired; None when they take it."""
        self.check()

    def check(self) -> None:
        """Look whether clients still take the certificate; say so once when they no longer do."""
        found = certificate_problem(self._cert, self.context)
        if found is not None and found != self.problem:
            log.error("--tls-cert %s is refused by clients: %s; renew it", self._cert, found)
        self.problem = found

    def accepts(self, authorization: str | None) -> bool:
        """Whether an `Authorization` header carries the token. Takes as long whatever is wrong with it."""
        scheme, _, given = (authorization or "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(errors="replace"), self._token)
        return right and scheme.lower() == "bearer"

    def refresh(self) -> bool:
        """Reload if a file changed since the last look. True when something new is in force."""
        try:
            stamps = self._stamps()
            if stamps == self._seen:
                return False
            token = self._read_token()
            self._load_certificate()  # into a context of its own first: a bad pair would break the live one
            self.context.load_cert_chain(self._cert, self._key)
        except (ConfigError, OSError) as error:
            log.error("the certificate or token was not renewed, the old one stays in force: %s", error)
            return False
        self._token, self._seen = token, stamps
        self.check()
        log.info("certificate and token were renewed")
        return True

    def _load_certificate(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            # An encrypted key must fail here, not ask for a password on the terminal.
            context.load_cert_chain(self._cert, self._key, password=lambda: b"")
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--tls-cert {self._cert} with --tls-key {self._key} cannot be loaded ({error}); "
                "give an unencrypted PEM pair that belongs together"
            ) from error
        return context

    def _read_token(self) -> bytes:
        try:
            token = self._token_file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"--token-file {self._token_file}: {error.strerror}") from error
        if len(token) < MIN_TOKEN_CHARS or not token.isascii() or len(token.split()) != 1:
            raise ConfigError(
                f"--token-file {self._token_file} must hold one word of at least {MIN_TOKEN_CHARS} ASCII characters"
            )
        return token

    def _stamps(self) -> tuple[Stamp, ...]:
        stamps = []
        for option, path in (
            ("--tls-cert", self._cert),
            ("--tls-key", self._key),
            ("--token-file", self._token_file),
        ):
            try:
                state = path.stat()
            except OSError as error:
                raise ConfigError(f"{option} {path}: {error.strerror}; give a readable file") from error
            stamps.append((state.st_mtime_ns, state.st_size, state.st_ino))
        return tuple(stamps)
