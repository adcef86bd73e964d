"""Credentials as a Secret holds them. Pure."""

from __future__ import annotations

import base64
from typing import Any

from ullage_operator.certificates import Credentials


def secret_data(credentials: Credentials) -> dict[str, str]:
    """`data` of the Secret."""
    texts = {
        "token": credentials.token,
        "tls.crt": credentials.certificate,
        "tls.key": credentials.key,
        "ca.crt": credentials.trusted,
    }
    return {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}


def credentials_of(secret: dict[str, Any]) -> Credentials:
    """Read a Secret back; what is missing or unreadable comes out empty, and so not valid."""
    data = secret.get("data") or {}

    def text(key: str) -> str:
        try:
            return base64.b64decode(data.get(key, ""), validate=True).decode()
        except ValueError:
            return ""

    return Credentials(token=text("token"), certificate=text("tls.crt"), key=text("tls.key"), trusted=text("ca.crt"))
