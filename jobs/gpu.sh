#!/usr/bin/env bash
# Checks and measures raylance on the GPU of this machine with one command, which asks nothing and takes ten minutes at most. The
# python3 here must have torch for CUDA and torchvision; the rest is installed beside it, into .gpu/, from the package index, or from
# the wheels in the folder WHEELS where none is reached. Arguments go to jobs/gpu.py.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -d .gpu ]; then
    # shellcheck disable=SC2086
    python3 -m pip install --quiet --disable-pip-version-check --no-deps --target .gpu ${WHEELS:+--no-index --find-links "$WHEELS"} \
        -r jobs/gpu/packages.txt
fi
# Behind the folder of this checkout, which Ray's workers must find as well.
export PYTHONPATH="$PWD:$PWD/.gpu${PYTHONPATH:+:$PYTHONPATH}"
export RAY_ADDRESS=${RAY_ADDRESS:-local} PYTHONUNBUFFERED=1
exec python3 jobs/gpu.py "$@"
