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
# Installs again only when pyproject.toml or the constraints changed.
wanted=$(cat pyproject.toml "$constraints" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$venv/installed-$1" 2>/dev/null)" != "$wanted" ]; then
    # uv installs in a fifth of pip's time. It takes the packages that pip would: it gets pip's settings. It compiles
    # them, as pip does: else each process of Ray may compile torch for itself.
    echo "installing raylance[$1] into $venv: some gigabytes, torch and Ray among them, and with a fast line a minute or two …"
    quiet=--quiet
    if [ -t 2 ]; then quiet=; fi  # a terminal shows what is downloaded
    if { command -v uv || python -m pip install --quiet --disable-pip-version-check uv; } >/dev/null &&
        settings=$(python jobs/uv_settings.py) &&
        (
            eval "$settings"
            export UV_CONSTRAINT="$constraints ${UV_CONSTRAINT:-}"
            uv pip install $quiet --compile-bytecode --editable ".[$1]"
        ); then
        :
    else
        echo "uv did not install. pip does, which takes some minutes."
        python -m pip install $quiet --disable-pip-version-check --constraint "$constraints" --editable ".[$1]"
    fi
    echo "$wanted" >"$venv/installed-$1"
fi
# raylance, too: where Python is set to write no bytecode, each process of Ray would compile it for itself.
python -m compileall -q raylance jobs
