"""Token and certificate of a service's agents.

One self-signed server certificate per service, under a stable DNS name: pods come and go with their addresses,
and the operator checks the name. Whoever trusts it trusts that certificate alone, no authority.
Non-goals: storing them, and deciding when to renew (`reconcile` does both).
"""

from __future__ import annotations

import secrets
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ullage_operator.errors import CertificateError

LIFETIME = timedelta(days=365)
RENEWAL_MARGIN = timedelta(days=30)
"""A certificate with less time left than this is renewed."""
CLOCK_SKEW = timedelta(hours=1)
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What agents serve with and what their callers check: PEM texts and a bearer token."""

    token: str
    certificate: str
    key: str
    trusted: str
    """Certificates to trust: the present one, and its predecessor while agents still serve with that."""

    def __repr__(self) -> str:
        return "Credentials(<hidden>)"


def server_name(name: str, namespace: str) -> str:
    """Stable DNS name of a service's agents."""
    return f"{name}.{namespace}.agents.ullage.dev"


def issue(dns_name: str, *, now: float, previous: Credentials | None = None) -> Credentials:
    """New certificate and key. A predecessor's token is kept and its certificate stays trusted, so that agents
    that were not restarted yet remain reachable."""
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _self_sign(key, dns_name, datetime.fromtimestamp(now, UTC))
    pem = certificate.public_bytes(serialization.Encoding.PEM).decode()
    key_pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ).decode()
    return Credentials(
        token=previous.token if previous else secrets.token_urlsafe(TOKEN_BYTES),
        certificate=pem,
        key=key_pem,
        trusted=pem + (previous.certificate if previous else ""),
    )


def valid(credentials: Credentials, dns_name: str, *, now: float) -> bool:
    """Whether they can go on being used: readable, for this name, a matching pair, not near their end."""
    try:
        certificate = x509.load_pem_x509_certificate(credentials.certificate.encode())
        key = serialization.load_pem_private_key(credentials.key.encode(), password=None)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        client_context(credentials)
    except (ValueError, TypeError, x509.ExtensionNotFound, CertificateError):
        return False
    moment = datetime.fromtimestamp(now, UTC)
    return (
        bool(credentials.token)
        and key.public_key() == certificate.public_key()
        and dns_name in names.get_values_for_type(x509.DNSName)
        and certificate.not_valid_before_utc <= moment
        and certificate.not_valid_after_utc - moment > RENEWAL_MARGIN
        and credentials.certificate in credentials.trusted
    )


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """TLS settings of a caller: trusts these certificates alone and checks the name.

    Raises:
        CertificateError: `trusted` holds no readable certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_verify_locations(cadata=credentials.trusted)
    except (ssl.SSLError, ValueError) as error:
        raise CertificateError(f"trusted certificates cannot be read: {error}") from error
    return context


def _self_sign(key: ec.EllipticCurvePrivateKey, dns_name: str, now: datetime) -> x509.Certificate:
    # As its own trust anchor it must be a CA under OpenSSL's strict checks (default since Python 3.13).
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ullage agent")])
    public = key.public_key()
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA256())
    )
