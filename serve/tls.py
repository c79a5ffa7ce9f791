"""Certificate and private key of a server that speaks TLS."""

from __future__ import annotations

import ssl
from typing import NamedTuple


class KeyPair(NamedTuple):
    """Paths of PEM files, under uvicorn's names."""

    ssl_certfile: str
    ssl_keyfile: str


def key_pair(certfile: str | None, keyfile: str | None) -> KeyPair | None:
    """Return the two files, None if neither is given.

    Raises ValueError for one alone, and for files that cannot be read or do not belong together.
    """
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        given, other = ("certfile", "keyfile") if keyfile is None else ("keyfile", "certfile")
        raise ValueError(f"--ssl-{given} is {certfile or keyfile} and --ssl-{other} is missing; give both, or neither")
    for option, path in (("certfile", certfile), ("keyfile", keyfile)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            raise ValueError(f"--ssl-{option} {path} cannot be read ({error.strerror}); give a PEM file") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:  # ValueError: the key is encrypted, and a password is missing
        reason = getattr(error, "reason", None) or error
        raise ValueError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} are no certificate with its key ({reason}); give "
            "PEM files that belong together, the key without a password"
        ) from error
    return KeyPair(certfile, keyfile)
