#!/usr/bin/env bash
# Slurm on this one machine: munge, slurmctld and four slurmd, n1 .. n4, below a folder. As root.
#
#     tests/slurm/up.sh DIR PORT [PORT PORT PORT PORT]      then: export SLURM_CONF=DIR/slurm.conf
#
# Every node has two sockets of one core, which are this machine's. The network is a tree in which the nodes' numbers and
# their switches disagree: n1 and n3 hang on one leaf, n2 and n4 on the other. Nothing outside DIR is written.
set -euo pipefail
dir=$1 port=$2 host=$(hostname -s)
shift 2
mkdir -p "$dir"/{state,log,munge}
chmod 755 "$dir" "$dir/munge"

# Slurm's daemons trust each other by a key of munge.
(umask 077; head -c 1024 /dev/urandom > "$dir/munge.key")
munged --force --key-file="$dir/munge.key" --socket="$dir/munge/socket" --pid-file="$dir/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed"

# TmpFS by node: PMIx would otherwise use one folder for all of them. KillWait: seconds between SIGTERM and SIGKILL.
cat > "$dir/slurm.conf" <<CONF
ClusterName=ringmpi
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
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
TaskPlugin=task/affinity
TopologyPlugin=topology/tree
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
CONF
for i in 1 2 3 4; do
    mkdir -p "$dir/spool/n$i" "$dir/tmp/n$i"
    echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$1 CPUs=2 Sockets=2 CoresPerSocket=1 ThreadsPerCore=1 State=UNKNOWN"
    shift
done >> "$dir/slurm.conf"
echo "PartitionName=main Nodes=n[1-4] Default=YES MaxTime=30:00 State=UP" >> "$dir/slurm.conf"
printf '%s\n' "SwitchName=leaf0 Nodes=n[1,3]" "SwitchName=leaf1 Nodes=n[2,4]" "SwitchName=spine Switches=leaf[0-1]" > "$dir/topology.conf"
echo "CgroupPlugin=cgroup/v1" > "$dir/cgroup.conf"

export SLURM_CONF=$dir/slurm.conf
slurmctld -c
for i in 1 2 3 4; do slurmd -N "n$i"; done
for _ in $(seq 100); do
    [ "$(sinfo -h -N -o %T 2>/dev/null | grep -c '^idle$')" = 4 ] && exit 0
    sleep 0.1
done
sinfo -N -l >&2
tail -n 5 "$dir"/log/*.log >&2
exit 1
