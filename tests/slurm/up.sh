#!/usr/bin/env bash
# Slurm on this one machine: munge, slurmctld and four slurmd, n1 .. n4, below a folder. As root.
#
#     tests/slurm/up.sh DIR PORT [PORT PORT PORT PORT]      then: export SLURM_CONF=DIR/slurm.conf
#
# Every node has two sockets of one core, which are this machine's. The network is a tree in which the nodes' numbers and
# their switches disagree: n1 and n3 hang on one leaf, n2 and n4 on the other. Nothing outside DIR is written.
set -euo pipefail
. "$(dirname "$0")/common.sh"
dir=$1 port=$2 host=$(hostname -s)
shift 2
on() { shift; "$@"; }

begin "$host(127.0.0.1)"
# KillWait: seconds between SIGTERM and SIGKILL.
cat >> "$dir/slurm.conf" <<CONF
SlurmctldPort=$port
TaskPlugin=task/affinity
SchedulerParameters=batch_sched_delay=0
MpiDefault=none
KillWait=5
CONF
for i in 1 2 3 4; do
    node "$i" "NodeHostname=$host NodeAddr=127.0.0.1 Port=$1 CPUs=2 Sockets=2 CoresPerSocket=1"
    shift
done
printf '%s\n' "SwitchName=leaf0 Nodes=n[1,3]" "SwitchName=leaf1 Nodes=n[2,4]" "SwitchName=spine Switches=leaf[0-1]" > "$dir/topology.conf"
serve "$host" 4
