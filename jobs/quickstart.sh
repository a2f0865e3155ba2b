#!/usr/bin/env bash
# The main job from a fresh clone with one command: install, demo dataset, two CPU ranks, a trained classifier.
# A second call reuses what is there and continues where the last one stopped. Arguments go to jobs/train_images.py.
set -euo pipefail
cd "$(dirname "$0")/.."
source jobs/environment.sh jobs

# A Ray of its own, unless RAY_ADDRESS is set: a Ray that crashed on this machine leaves an address that hangs.
export RAY_ADDRESS=${RAY_ADDRESS:-local}

data=.data/digits.lance
if [ ! -d "$data" ]; then
    python jobs/create_dataset.py demo --out "$data"
fi
exec python jobs/train_images.py --data "$PWD/$data" --storage-path "$PWD/.data/runs" --num-workers 2 --epochs 3 \
    --target-accuracy 0.95 "$@"
