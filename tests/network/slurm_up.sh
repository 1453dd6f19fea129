#!/usr/bin/env bash
# Slurm across the hosts of a lab of two switches (lab.py): slurmctld on head, a slurmd on each of n1 .. nN, every one in its own
# namespace under its own host name; topology.conf says how the hosts hang on the switches. Installs Slurm where it is not.
#
#     RINGMPI_LAB=PREFIX RINGMPI_LAB_ENV=FOLDER slurm_up.sh N DIR      then: SLURM_CONF=DIR/slurm.conf enter.sh head srun ...
set -euo pipefail
here=$(dirname "$0") n=$1 dir=$2
. "$here/../slurm/common.sh"
on() { "$here/enter.sh" "$@"; }

for program in slurmctld slurmd munged srun; do
    command -v "$program" > /dev/null && continue
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge > /dev/null
    break
done

begin "head(10.77.0.254)"
cat >> "$dir/slurm.conf" <<CONF
TaskPlugin=task/none
MpiDefault=pmi2
KillWait=2
CONF
for i in $(seq "$n"); do node "$i" "NodeAddr=10.77.0.$i CPUs=1 Boards=1 SocketsPerBoard=1 CoresPerSocket=1"; done
printf 'SwitchName=s0 Nodes=n[%s]\nSwitchName=s1 Nodes=n[%s]\nSwitchName=spine Switches=s[0-1]\n' \
    "$(seq -s, 1 2 "$n")" "$(seq -s, 2 2 "$n")" > "$dir/topology.conf"
serve head "$n"
