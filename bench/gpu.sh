#!/usr/bin/env bash
# Everything that can only be known on a GPU, in one command:
#
#     bash bench/gpu.sh [RESULTS]                 RESULTS: a folder, bench/results unless given
#     bash bench/gpu.sh --dry-run RESULTS         a little of every part on the tests' pretended device: its figures mean nothing
#
#  1. versions       the GPU, the packages, the MPI
#  2. compile        every kernel, by all cores, into CuPy's cache
#  3. probe          every instruction that the kernels use, against what it is defined to do
#  4. tile           the CUDA tests, on CuPy instead of the emulator
#  5. libraries      CuPy's names and arguments, and arrays of PyTorch, JAX and Numba where they are installed
#  6. ring-1, -2, -4 rings that share the GPU, with the MPI that is there: its own device memory, or staged
#  7. speed          operations a second of the tile, and of PyTorch's attention where it is installed
#  8. memcheck, racecheck    compute-sanitizer over the probe and some of the tests
#
# Needs ringmpi with its extras `test` and `cuda12x` or `cuda13x`, in the Python that PYTHON names, or `python`, or `python3`; for 6 an
# MPI (extra `mpich` or the cluster's), for 8 compute-sanitizer. What is not there is left out, and the summary says so. Each part writes a
# file of its own, whole or not at all; a part that fails does not keep the others from running. Exit status: 0 if all that ran passed,
# 1 if a part failed, 2 for other words than these, 3 where there is no GPU: then nothing is written.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

usage() { sed -n '2,5p' bench/gpu.sh | cut -c 3- >&2; exit 2; }
dry=
case ${1-} in
    --dry-run) dry=yes; shift; [ $# = 1 ] || usage ;;
    -*) usage ;;
esac
[ $# -le 1 ] || usage
python=${PYTHON:-$(command -v python || command -v python3)}
export PYTHONPATH=$PWD:$PWD/tests OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

if [ -z "$dry" ]; then
    seen=$("$python" -c 'import cupy; print(cupy.cuda.runtime.getDeviceCount(), "GPU")' 2>&1) ||
        { echo "no GPU that CuPy can use, so nothing was run and nothing written: $(tail -n 1 <<< "$seen")" >&2; exit 3; }
    export RINGMPI_GPU=1
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
results=${1:-bench/results}/gpu-$(date -u +%Y-%m-%d)${dry:+-dry-run}
mkdir -p "$results" || exit 2
failed=0

# part NAME MINUTES COMMAND ...: runs it; its output becomes NAME.txt when it is over, with how it ended in the last line.
part() {
    local name=$1 minutes=$2 began=$SECONDS how=passed
    shift 2
    timeout --kill-after=10 "$((minutes * 60))" "$@" > "$work/$name.txt" 2>&1
    case $? in
        0) ;;
        124 | 137) how="failed: not done in $minutes minutes" ;;
        *) how="failed" ;;
    esac
    [ "$how" = passed ] || { failed=1; tail -n 40 "$work/$name.txt"; }
    told "$name" "$how, $((SECONDS - began)) s"
    echo "$how" >> "$work/$name.txt"
    mv "$work/$name.txt" "$results/$name.txt"
}
told() { printf '%-10s  %s\n' "$1" "$2" | tee -a "$work/summary"; }
tests() { "$python" -m pytest -q -p no:cacheprovider "$@"; }
has() { command -v "$1" > /dev/null 2>&1; }
# What a part is, is a function, so that the limit of time is on a process of its own.
export -f tests
export python

some=()
[ -z "$dry" ] || some=(-k "lengths or instructions or sinks")
part versions 2 bash -c 'date -u; nvidia-smi || [ -n "$0" ] || exit 1
    "$python" -m pip list; git log -1 --format=%H; "$python" -m ringmpi info' "$dry"
part compile 10 "$python" bench/gpu.py --compile ${dry:+--dry-run}
part probe 5 bash -c 'tests "$@"' tests tests/test_cuda_probe.py
part tile 15 bash -c 'tests "$@"' tests tests/test_cuda_tile.py "${some[@]}"
part libraries 5 bash -c 'tests "$@"' tests tests/test_interop.py tests/test_cupy.py -k "not compile"
if has mpiexec && "$python" -c 'from mpi4py import MPI' > /dev/null 2>&1; then
    for ranks in 1 2 4; do
        part "ring-$ranks" 10 mpiexec -n "$ranks" "$python" -m mpi4py \
            -m pytest -q -p no:cacheprovider --with-mpi tests/rings/test_device.py "${some[@]}"
    done
else
    told ring "left out: no mpiexec on the path, or no MPI that mpi4py can load"
fi
part speed 10 "$python" bench/gpu.py --against torch ${dry:+--dry-run}
for tool in memcheck racecheck; do
    if [ -n "$dry" ]; then
        told "$tool" "left out: a dry run"
    elif has compute-sanitizer; then
        part "$tool" 15 compute-sanitizer --tool "$tool" --error-exitcode 1 "$python" -m pytest -q -p no:cacheprovider \
            tests/test_cuda_probe.py tests/test_cuda_tile.py -k "instructions or masks or dims"
    else
        told "$tool" "left out: compute-sanitizer is not on the path"
    fi
done

mv "$work/summary" "$results/summary.txt"
echo
cat "$results/speed.txt"
[ -z "$dry" ] || echo "a dry run: no GPU was used, and no figure above means anything"
exit "$failed"
