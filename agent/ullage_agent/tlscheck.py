"""Would a client that trusts this certificate accept it now? Found out by a handshake in memory.

Python's ssl tells no dates of a certificate of one's own; a handshake tells what matters, expired or not yet valid.
"""

from __future__ import annotations

import ssl
from pathlib import Path

ROUNDS = 10


def certificate_problem(cert: Path, server: ssl.SSLContext) -> str | None:
    """Why clients refuse the certificate that `server` serves, trusted as it is; None when they take it.

    `cert` is the PEM chain that `server` has loaded.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        client.load_verify_locations(cert)
        _handshake(client, server)
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except (OSError, ssl.SSLError) as error:
        return str(error)
    return None


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_side=False),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(ROUNDS):
        done = [_step(end) for end in ends]  # both must go on
        if all(done):
            return


def _step(end: ssl.SSLObject) -> bool:
    """Go on with one side; True when it is done."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
