#!/usr/bin/env bash
# Ends what up.sh started below a folder, jobs first.
#
#     tests/slurm/down.sh DIR
set -uo pipefail
dir=$1
export SLURM_CONF=$dir/slurm.conf
scancel --user=root 2>/dev/null
scancel --user=root --full --signal=KILL 2>/dev/null
for _ in $(seq 100); do
    [ -z "$(squeue -h 2>/dev/null)" ] && break
    sleep 0.1
done
daemons() {
    for file in "$dir"/slurmd.*.pid "$dir"/slurmctld.pid "$dir"/munged.pid; do
        [ -s "$file" ] && kill "$1" "$(cat "$file")" 2>/dev/null && alive=1
    done
}
alive=0
daemons -TERM
for _ in $(seq 100); do
    alive=0
    daemons -0
    [ "$alive" = 0 ] && exit 0
    sleep 0.1
done
daemons -KILL
exit 1
