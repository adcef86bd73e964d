"""Credentials: accepted where they should be, under OpenSSL's strict rules too, and renewed without a gap."""

from __future__ import annotations

import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ullage_operator.certificates import Credentials, client_context, issue, server_name, valid
from ullage_operator.errors import CertificateError

NAME = server_name("web", "prod")
DAY = 86400.0


def handshake(folder: Path, served: Credentials, trusting: Credentials, *, strict: bool, name: str = NAME) -> None:
    """A TLS handshake in memory; raises ssl.SSLError when either side refuses."""
    (folder / "c").write_text(served.certificate)
    (folder / "k").write_text(served.key)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(folder / "c", folder / "k")
    client_side = client_context(trusting)
    if strict:
        client_side.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(to_client, to_server, server_hostname=name)
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(10):
        done = 0
        for side in (client, server):
            try:
                side.do_handshake()
                done += 1
            except ssl.SSLWantReadError:
                pass
        if done == 2:
            return
    raise AssertionError("the handshake did not end")


@pytest.mark.parametrize("strict", [False, True])
def test_a_caller_accepts_its_agents(tmp_path: Path, strict: bool) -> None:
    credentials = issue(NAME, now=time.time())
    handshake(tmp_path, credentials, credentials, strict=strict)


def test_a_caller_refuses_others(tmp_path: Path) -> None:
    mine, other = issue(NAME, now=time.time()), issue(NAME, now=time.time())
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, other, mine, strict=True)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, mine, mine, strict=True, name=server_name("web", "test"))


def test_renewal_keeps_the_token_and_goes_on_trusting_the_old_certificate(tmp_path: Path) -> None:
    old = issue(NAME, now=time.time())
    new = issue(NAME, now=time.time(), previous=old)
    assert new.token == old.token
    assert new.certificate != old.certificate
    handshake(tmp_path, old, new, strict=True)
    handshake(tmp_path, new, new, strict=True)
    newest = issue(NAME, now=time.time(), previous=new)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, old, newest, strict=True)


def test_validity_ends_a_month_before_the_certificate() -> None:
    now = time.time()
    credentials = issue(NAME, now=now)
    assert valid(credentials, NAME, now=now)
    assert valid(credentials, NAME, now=now + 334 * DAY)
    assert not valid(credentials, NAME, now=now + 336 * DAY)
    assert not valid(credentials, NAME, now=now - DAY)


@pytest.mark.parametrize(
    "damage",
    [
        {"token": ""},
        {"key": ""},
        {"key": "garbage"},
        {"certificate": ""},
        {"certificate": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"},
        {"trusted": ""},
        {"trusted": issue(NAME, now=time.time()).trusted},
        {"key": issue(NAME, now=time.time()).key},
    ],
)
def test_damaged_credentials_are_not_valid(damage: dict[str, str]) -> None:
    now = time.time()
    assert not valid(replace(issue(NAME, now=now), **damage), NAME, now=now)


def test_another_name_is_not_valid() -> None:
    now = time.time()
    assert not valid(issue(NAME, now=now), server_name("web", "test"), now=now)


def test_no_trust_without_a_certificate() -> None:
    credentials = replace(issue(NAME, now=time.time()), trusted="nothing")
    with pytest.raises(CertificateError):
        client_context(credentials)


def test_secrets_are_not_shown() -> None:
    credentials = issue(NAME, now=time.time())
    assert credentials.token not in repr(credentials)
    assert "PRIVATE" not in repr(credentials)
