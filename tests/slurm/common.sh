# What the two Slurms of the tests share: four nodes on this machine (up.sh), and the hosts of a lab (../network/slurm_up.sh).
# To be sourced, with dir set, and on() defined: on HOST COMMAND... runs a command where HOST's daemons live.

# begin HOST(ADDRESS): the folders below dir, munge, and the settings that both have; HOST runs slurmctld.
begin() {
    mkdir -p "$dir"/{state,log,munge}
    chmod 755 "$dir" "$dir/munge"

    # Slurm's daemons trust each other by a key of munge.
    (umask 077; head -c 1024 /dev/urandom > "$dir/munge.key")
    munged --force --key-file="$dir/munge.key" --socket="$dir/munge/socket" --pid-file="$dir/munged.pid" \
        --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed"

    # TmpFS by node: PMIx would otherwise use one folder for all of them.
    cat > "$dir/slurm.conf" <<CONF
ClusterName=ringmpi
SlurmctldHost=$1
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
TopologyPlugin=topology/tree
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
ReturnToService=2
CONF
    echo "CgroupPlugin=cgroup/v1" > "$dir/cgroup.conf"
    export SLURM_CONF=$dir/slurm.conf
}

# node I WORDS: one of the nodes n1, n2, ...
node() {
    mkdir -p "$dir/spool/n$1" "$dir/tmp/n$1"
    echo "NodeName=n$1 $2 ThreadsPerCore=1 State=UNKNOWN" >> "$dir/slurm.conf"
}

# serve HEAD N: a partition of n1 .. nN, and their daemons; fails with the ends of the logs unless all are idle in time.
serve() {
    echo "PartitionName=main Nodes=n[1-$2] Default=YES MaxTime=30:00 State=UP" >> "$dir/slurm.conf"
    on "$1" slurmctld -c
    for i in $(seq "$2"); do on "n$i" slurmd -N "n$i"; done
    for _ in $(seq 150); do
        [ "$(on "$1" sinfo -h -N -o %T 2>/dev/null | grep -c '^idle$')" = "$2" ] && return 0
        sleep 0.1
    done
    on "$1" sinfo -N -l >&2
    tail -n 5 "$dir"/log/*.log >&2
    return 1
}
