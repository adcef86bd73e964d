from pathlib import Path
from typing import Any

import pytest

from ullage_agent.credentials import Credentials
from ullage_agent.errors import ConfigError


def load(tls: Any) -> Credentials:
    return Credentials(tls.cert, tls.key, tls.token)


def test_scheme_is_case_insensitive(tls: Any) -> None:
    assert load(tls).accepts(f"bearer {tls.secret}")
    assert not load(tls).accepts(None)
    assert not load(tls).accepts("Bearer \udcff")


@pytest.mark.parametrize("content", ["", "short", "two words of a token", "ü" * 20])
def test_weak_tokens_are_refused(tls: Any, content: str) -> None:
    tls.token.write_text(content)
    with pytest.raises(ConfigError, match=r"--token-file .* at least 16"):
        load(tls)


@pytest.mark.parametrize("option", ["cert", "key", "token"])
def test_a_missing_file_names_its_option(tls: Any, option: str) -> None:
    getattr(tls, option).unlink()
    with pytest.raises(ConfigError, match=f"--(tls-)?{option}.*No such file"):
        load(tls)


def test_a_pair_that_does_not_belong_together(tls: Any, tmp_path: Path, make_pair: Any) -> None:
    make_pair(tmp_path / "other.crt", tls.key, "other")
    with pytest.raises(ConfigError, match="belongs together"):
        load(tls)


def test_an_encrypted_key_fails_instead_of_asking(tls: Any, make_pair: Any) -> None:
    make_pair(tls.cert, tls.key, "sealed", b"password")
    with pytest.raises(ConfigError, match="unencrypted"):
        load(tls)


def test_garbage_instead_of_a_certificate(tls: Any) -> None:
    tls.cert.write_text("-----BEGIN NOTHING-----")
    with pytest.raises(ConfigError, match=r"tls\.crt"):
        load(tls)


def test_nothing_changed_is_nothing_done(tls: Any) -> None:
    assert not load(tls).refresh()


def test_half_a_rotation_keeps_the_old_pair(
    tls: Any, tmp_path: Path, make_pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    credentials = load(tls)
    make_pair(tls.cert, tmp_path / "new.key", "second")
    assert not credentials.refresh()
    assert "old one stays" in caplog.text
    assert credentials.accepts(f"Bearer {tls.secret}")
    (tmp_path / "new.key").replace(tls.key)
    assert credentials.refresh()


def test_a_vanished_token_keeps_the_old_one(tls: Any, caplog: pytest.LogCaptureFixture) -> None:
    credentials = load(tls)
    tls.token.unlink()
    assert not credentials.refresh()
    assert credentials.accepts(f"Bearer {tls.secret}")
    assert "--token-file" in caplog.text
