"""Pip's settings as uv reads them: prints one `export` line for each. It installs nothing and names no registry.

uv reads neither pip's configuration files nor its environment variables. Without this step, uv would look for packages
in other places than pip does, and could take another build of one. Exit status 1 means: pip has a setting that has no
counterpart here, so let pip install.
"""

import ast
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping

# pip's setting → uv's variable, and what separates several values in it (None: there is only one).
COUNTERPARTS: dict[str, tuple[str, str | None]] = {
    "index-url": ("UV_DEFAULT_INDEX", None),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", None),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", None),
    "proxy": ("ALL_PROXY", None),
    "default-timeout": ("UV_HTTP_TIMEOUT", None),
    "timeout": ("UV_HTTP_TIMEOUT", None),
}
# Settings that do not change which packages pip takes, nor where it finds them.
WITHOUT_EFFECT = {
    "break-system-packages",
    "cache-dir",
    "disable-pip-version-check",
    "no-cache-dir",
    "no-color",
    "no-input",
    "no-python-version-warning",
    "no-warn-script-location",
    "prefer-binary",
    "progress-bar",
    "quiet",
    "require-virtualenv",
    "retries",
    "root-user-action",
    "user",
    "verbose",
}


def uv_settings(pip_config_list: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Translates what `pip config list` prints; a variable that is set already stays as it is.

    Raises:
        KeyError: A setting has no counterpart; names it.
    """
    values: dict[tuple[int, str], str] = {}
    for line in pip_config_list.splitlines():
        key, _, quoted = line.partition("=")
        section, _, name = key.rpartition(".")
        if section not in ("global", "install", ":env:") or name in WITHOUT_EFFECT:
            continue
        if name not in COUNTERPARTS:
            raise KeyError(name)
        values[("global", "install", ":env:").index(section), name] = ast.literal_eval(quoted)
    found: dict[str, str] = {}
    for (_, name), value in sorted(values.items()):  # later sections win, as in pip
        variable, separator = COUNTERPARTS[name]
        found[variable] = value.strip() if separator is None else separator.join(value.split())
    if "UV_INDEX" in found:
        found["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip's way: the best version of all indexes, not of the first
    return {variable: value for variable, value in found.items() if variable not in environment}


def main() -> int:
    """Prints the lines for a shell to evaluate."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    try:
        settings = uv_settings(listed, os.environ)
    except KeyError as error:
        print(f"pip's setting {error} has no counterpart in uv. pip installs, which takes longer.", file=sys.stderr)
        return 1
    for variable, value in settings.items():
        print(f"export {variable}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
