"""Which parts of a URI are secret, and the URI without them, for messages, logs and records."""

import re

_USER = re.compile(r"(?<=://)(?:[^:/@\s]*:\S*|[^/@\s]*)@")
_PASSWORD = re.compile(r"(?<=://)[^:/@\s]*:(?!\d+/)\S*@")  # but not a port before a path that has an @
_SECRET = re.compile(r"(?i)([?&][^=&#\s]*(?:sig|credential|token|secret|password|key)[^=&#\s]*=)[^&#\s'\"]+")


def public_uri(uri: str) -> str:
    """Returns the URI without its user, its password and the secrets in its query, so that others may see it."""
    return _SECRET.sub(r"\1…", _USER.sub("…@", uri))


def holds_secret(uri: str) -> bool:
    """Whether a URI has a password, or a key in its query. A name alone, as in abfss:// URIs, is not a secret."""
    return "://" in uri and bool(_PASSWORD.search(uri) or _SECRET.search(uri))
