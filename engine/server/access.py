"""Who may reach the server and how: keys from the command line and from a file, origins of web pages, certificates.

Checked before anything is loaded; what is wrong is a ConfigError in one sentence that never shows a key.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from engine.config import ConfigError

ANY_ORIGIN = "*"
MAX_KEY_FILE_BYTES = 2**20


def collect_keys(keys: Sequence[str], path: str | None) -> tuple[str, ...]:
    """Those given one by one and those of a file that holds one a line.

    Raises ConfigError for an empty key, a file that cannot be read or holds none, and what a header cannot carry.
    """
    if any(not key.strip() for key in keys):
        raise ConfigError("--api-key is empty; give a key or leave the option out.")
    if not all(map(_is_sendable, keys)):
        raise ConfigError("--api-key must be printable ASCII, since HTTP headers carry nothing else safely.")
    return (*(key.strip() for key in keys), *([] if path is None else _read_keys(Path(path))))


def _read_keys(path: Path) -> list[str]:
    """Blank lines do not count, nor does space around a key."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_KEY_FILE_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--api-key-file {str(path)[:200]} cannot be read ({reason}); name another file.") from None
    if len(raw) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path} is larger than {MAX_KEY_FILE_BYTES} bytes; give one key a line.")
    keys = []
    for number, line in enumerate(raw.decode("latin-1").splitlines(), start=1):
        key = line.strip()
        if not _is_sendable(key):
            raise ConfigError(f"--api-key-file {path}: line {number} must be printable ASCII; correct it.")
        keys += [key] if key else []
    if not keys:
        raise ConfigError(f"--api-key-file {path} holds no key; write one a line or leave the option out.")
    return keys


def _is_sendable(key: str) -> bool:
    return key.isascii() and key.isprintable()


def check_origins(origins: Sequence[str]) -> tuple[str, ...]:
    """Origins as browsers send them, or "*". Raises ConfigError for anything else."""
    for origin in origins:
        if origin != ANY_ORIGIN and not _is_origin(origin):
            raise ConfigError(
                f"--allow-origin {origin[:200]!r} is no origin; give scheme and host, as in https://a.example.com, or "
                "* for any."
            )
    return tuple(origins)


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises ValueError where it is no number
    except ValueError:
        return False
    return bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}" and "@" not in text


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raises ConfigError unless the server can speak TLS with them; both None: it does not."""
    if certfile is None and keyfile is None:
        return
    if certfile is None:
        raise ConfigError("--ssl-keyfile needs --ssl-certfile; give the certificate too.")
    for option, path in (("--ssl-certfile", certfile), ("--ssl-keyfile", keyfile)):
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{option} {path[:200]} is no file; name the PEM file.")
    try:
        # An encrypted key fails here instead of asking at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"--ssl-certfile {certfile[:200]} and its key cannot be used ({error}); give a PEM certificate and a key "
            "that is not encrypted."
        ) from None
