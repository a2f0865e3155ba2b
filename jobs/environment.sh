# Sourced by quickstart.sh and tests/run, from the repository root: makes .venv with the pinned packages of the extras
# named in $1, or reuses it, and activates it. Set PYTHON to choose the interpreter.
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "raylance needs Python 3.11 or newer, and $python is $("$python" --version): nothing was installed." \
        "Set PYTHON to a newer interpreter." >&2
    exit 2
fi
if [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv
fi
source .venv/bin/activate
# Installed again only when what it is made from changed.
wanted=$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)
if [ "$(cat ".venv/installed-$1" 2>/dev/null)" != "$wanted" ]; then
    echo "installing raylance[$1] into .venv …"
    python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$1]"
    echo "$wanted" >".venv/installed-$1"
fi
