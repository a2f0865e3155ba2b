# Sourced by quickstart.sh, tests/run and tests/lowest, from the repository root: makes the virtual environment $2 (.venv)
# with the packages of the extras named in $1, as $3 (constraints.txt) allows, or reuses it, and activates it. Set PYTHON
# to choose the interpreter.
venv=${2:-.venv}
constraints=${3:-constraints.txt}
python=${PYTHON:-$(command -v python3.11 || command -v python3)}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "raylance needs Python 3.11 or newer, and $python is $("$python" --version): nothing was installed." \
        "Set PYTHON to a newer interpreter." >&2
    exit 2
fi
if [ ! -x "$venv/bin/python" ]; then
    "$python" -m venv "$venv"
fi
source "$venv/bin/activate"
# Installed again only when what it is made from changed.
wanted=$(cat pyproject.toml "$constraints" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$venv/installed-$1" 2>/dev/null)" != "$wanted" ]; then
    echo "installing raylance[$1] into $venv …"
    python -m pip install --quiet --disable-pip-version-check --constraint "$constraints" --editable ".[$1]"
    echo "$wanted" >"$venv/installed-$1"
fi
