#!/usr/bin/env bash
# Ends what slurm_up.sh started below a folder.
#
#     slurm_down.sh DIR
pids=$(cat "$1"/slurmd.*.pid "$1"/slurmctld.pid "$1"/munged.pid 2>/dev/null)
for signal in TERM KILL; do
    for pid in $pids; do kill -$signal "$pid" 2>/dev/null; done
    for _ in $(seq 50); do
        alive=$(for pid in $pids; do kill -0 "$pid" 2>/dev/null && echo "$pid"; done)
        [ -z "$alive" ] && exit 0
        sleep 0.1
    done
done
exit 1
