#!/usr/bin/env bash
# enter.sh [-options] HOST COMMAND...: runs a command on a host of a lab, under the host's own name. Launchers take it for ssh.
while [ "${1#-}" != "$1" ]; do shift; done
export LAB_HOST=$1
shift
exec ip netns exec "$RINGMPI_LAB$LAB_HOST" unshare --uts bash -c '
    hostname "$LAB_HOST"
    if [ -e "$RINGMPI_LAB_ENV/$LAB_HOST" ]; then . "$RINGMPI_LAB_ENV/$LAB_HOST"; fi
    unset LAB_HOST
    eval "$*"' enter "$@"
