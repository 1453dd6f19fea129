#!/usr/bin/env bash
# Slurm across the hosts of a lab of two switches (lab.py): slurmctld on head, a slurmd on each of n1 .. nN, every one in its own
# namespace under its own host name; topology.conf says how the hosts hang on the switches. Installs Slurm where it is not.
#
#     RINGMPI_LAB=PREFIX RINGMPI_LAB_ENV=FOLDER slurm_up.sh N DIR      then: SLURM_CONF=DIR/slurm.conf enter.sh head srun ...
set -euo pipefail
n=$1 dir=$2 enter=$(dirname "$0")/enter.sh
if ! command -v slurmctld slurmd munged srun > /dev/null; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge > /dev/null
fi
mkdir -p "$dir"/{state,log,munge}
chmod 755 "$dir" "$dir/munge"
(umask 077; head -c 1024 /dev/urandom > "$dir/munge.key")
munged --force --key-file="$dir/munge.key" --socket="$dir/munge/socket" --pid-file="$dir/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed"

cat > "$dir/slurm.conf" <<CONF
ClusterName=ringmpi-lab
SlurmctldHost=head(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
CredType=cred/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
TmpFS=$dir/tmp/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TopologyPlugin=topology/tree
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
MpiDefault=pmi2
ReturnToService=2
KillWait=2
CONF
for i in $(seq "$n"); do
    mkdir -p "$dir/spool/n$i" "$dir/tmp/n$i"
    echo "NodeName=n$i NodeAddr=10.77.0.$i CPUs=1 Boards=1 SocketsPerBoard=1 CoresPerSocket=1 ThreadsPerCore=1 State=UNKNOWN"
done >> "$dir/slurm.conf"
echo "PartitionName=main Nodes=n[1-$n] Default=YES MaxTime=30:00 State=UP" >> "$dir/slurm.conf"
printf 'SwitchName=s0 Nodes=n[%s]\nSwitchName=s1 Nodes=n[%s]\nSwitchName=spine Switches=s[0-1]\n' \
    "$(seq -s, 1 2 "$n")" "$(seq -s, 2 2 "$n")" > "$dir/topology.conf"
echo "CgroupPlugin=cgroup/v1" > "$dir/cgroup.conf"

export SLURM_CONF=$dir/slurm.conf
"$enter" head slurmctld -c
for i in $(seq "$n"); do "$enter" "n$i" slurmd -N "n$i"; done
for _ in $(seq 150); do
    [ "$("$enter" head sinfo -h -N -o %T 2>/dev/null | grep -c '^idle$')" = "$n" ] && exit 0
    sleep 0.1
done
"$enter" head sinfo -N -l >&2
tail -n 5 "$dir"/log/*.log >&2
exit 1
