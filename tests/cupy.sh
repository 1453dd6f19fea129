#!/usr/bin/env bash
# The tests that need the real CuPy and no GPU: what the library asks of it, and every kernel compiled by its own way for sm_90.
#
#     bash tests/cupy.sh             CuPy for CUDA 13; some minutes
#     bash tests/cupy.sh cuda12x     for CUDA 12
#     bash tests/cupy.sh cuda13x --all    for sm_80 and sm_100 too; further words are pytest's
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extra=${1:-cuda13x}
if [ ! -e ".venv/$extra/ready" ]; then
    python3 -m venv ".venv/$extra"
    ".venv/$extra/bin/python" -m pip install --quiet --disable-pip-version-check -e ".[$extra,test]"
    touch ".venv/$extra/ready"
fi
exec ".venv/$extra/bin/python" -m pytest tests/test_cupy.py "${@:2}"
