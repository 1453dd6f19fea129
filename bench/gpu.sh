#!/usr/bin/env bash
# Everything that can only be known on a GPU, in one command:
#
#     bash bench/gpu.sh [RESULTS]                 RESULTS: a folder, bench/results unless given
#
# 1. a probe of every instruction that the kernels use, against what it is defined to do
# 2. the CUDA tests, on CuPy instead of the emulator
# 3. compute-sanitizer over the probe and some of them: memory errors and races
# 4. rings of 1, 2 and 4 ranks that share the GPU
# 5. operations a second of the tile
#
# Needs ringmpi with its extras `test` and `cuda12x` or `cuda13x`, and an MPI (extra `mpich` or the cluster's). Each part's output goes to a
# file of its own beside the versions and the date; the first part that fails ends it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

results=${1:-bench/results}/gpu-$(date -u +%Y-%m-%d)
python=${PYTHON:-python}
mkdir -p "$results"
export RINGMPI_GPU=1 PYTHONPATH=$PWD

part() {
    echo "== $1"
    "${@:2}" > "$results/$1.txt" 2>&1 || { tail -n 40 "$results/$1.txt"; exit 1; }
    tail -n 1 "$results/$1.txt"
}

part versions bash -c "nvidia-smi; $python -m pip list; $python -m ringmpi info; git log -1 --format=%H"
part probe "$python" -m pytest -q tests/test_cuda_probe.py
part tile "$python" -m pytest -q tests/test_cuda_tile.py
for tool in memcheck racecheck; do
    part "$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" -m pytest -q tests/test_cuda_probe.py tests/test_cuda_tile.py -k "instructions or masks or dims"
done
for ranks in 1 2 4; do
    part "ring-$ranks" mpiexec -n "$ranks" "$python" -m mpi4py -m pytest -q --with-mpi tests/rings/test_device.py
done
part speed "$python" bench/gpu.py
cat "$results/speed.txt"
