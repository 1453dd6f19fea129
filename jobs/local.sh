#!/usr/bin/env bash
# Ring attention on four ranks of this machine, which needs Python (3.10 or later, with venv) and nothing else.
#
#     bash jobs/local.sh
#
# Makes a virtual environment in .venv/local, installs ringmpi and an MPI from wheels into it, attends to the queries, keys and
# values that a real model computed of 2,048 tokens, and shows how far that is from dense attention.
set -euo pipefail
# Without an environment bash has a PATH of its own that Python would not see.
export PATH
cd "$(dirname "${BASH_SOURCE[0]}")/.."

here=.venv/local
[ -e "$here/bin/pip" ] || "${PYTHON:-python3}" -m venv "$here"
"$here/bin/pip" install --quiet --disable-pip-version-check ".[mpich]"

results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT

# A thread a rank: four ranks share this machine's cores.
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
"$here/bin/mpiexec" -n 4 "$here/bin/ringmpi" attend tests/data/q.npy tests/data/k.npy tests/data/v.npy --causal \
    --dtype float32 --out "$results/out.npy" --lse "$results/lse.npy"

"$here/bin/python" - "$results" <<'EOF'
import sys
import numpy as np

out, lse = (np.load(f"{sys.argv[1]}/{name}.npy") for name in ("out", "lse"))
dense = {"out": np.load("tests/data/out_causal_every8.npy"), "lse": np.load("tests/data/lse_causal.npy")}
worst = {"out": np.abs(out[:, ::8] - dense["out"]).max(), "lse": np.abs(lse - dense["lse"]).max()}
for name, error in worst.items():
    print(f"largest difference from dense attention, {name}: {error:.1e} (values to {np.abs(dense[name]).max():.2f})")
sys.exit(0 if max(worst.values()) < 2e-5 else "that is too much")
EOF
