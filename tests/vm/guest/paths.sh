# shellcheck shell=bash
# The paths of a host with native multipath, distinguished by the port of the target. After lib.sh.

path_ctrl() { # PORT: its controller
  local c
  for c in /sys/class/nvme/nvme*; do
    if [[ $(<"$c/subsysnqn") = "$NQN" && $(<"$c/address") = *trsvcid=$1* ]]; then
      echo "${c##*/}"
      return 0
    fi
  done 2>/dev/null
  return 1
}
path_block() { # PORT: the hidden block device of namespace 1 on it
  local c b
  c=$(path_ctrl "$1") || return 1
  for b in /sys/class/nvme/"$c"/nvme*c*n*; do
    if [ "$(cat "$b/nsid" 2>/dev/null)" = 1 ]; then
      echo "$b"
      return 0
    fi
  done
  return 1
}
state_file() { echo "$(path_block "$1")/ana_state"; }
live() { [ "$(<"/sys/class/nvme/$(path_ctrl "$1")/state")" = live ]; } 2>/dev/null
lost() { ! live "$1"; }

# What is timed runs without a process of its own: on one CPU that would take longer than what is timed.
exec {nap}<> <(:)
ms() { MS=${EPOCHREALTIME/./} MS=$((MS / 1000)); }
until_ms() { # MS CONDITION...
  local end
  ms
  end=$((MS + $1))
  shift
  until "$@"; do
    ms
    if [ "$MS" -ge $end ]; then return 1; fi
    read -rt 0.003 -u "$nap"
  done
  ms
}
count() { read -r READS _ _ _ WRITES _ <"$1" && COUNT=$((READS + WRITES)); }
counts_on() { count "$1" && [ "$COUNT" -gt "$2" ]; }
says() { local state; read -r state <"$1" && [ "$state" = "$2" ]; }
idle() { # PORT: no I/O for 100 ms
  local file before
  file=$(path_block "$1")/stat
  count "$file"
  before=$COUNT
  read -rt 0.1 -u "$nap"
  ! counts_on "$file" "$before"
}

watch() { # PORT: the path to which I/O is to go
  WATCHED=$(path_block "$1")/stat
  count "$WATCHED"
  WAS=$COUNT
}
# WHAT PORT: from START on until I/O is done on the watched path
failover() {
  if until_ms 20000 counts_on "$WATCHED" "$WAS"; then
    pass "$1: I/O on the path of port $2 after $((MS - START)) ms"
  else
    fail "$1: I/O on the path of port $2 within 20 s"
  fi
}
connect_path() { # ADDRESS PORT
  timeout -k 5 60 nvme connect -t rdma -a "$1" -s "$2" -n "$NQN" --hostnqn="$HOSTNQN" --hostid="$HOSTID" -k 1 -c 1 -l 60
}

# The disk of two daemons, for each by one of ${LOOPS[@]}: the pages of one file in memory, as each daemon wants a device for itself.
DISK=/mnt/shared
shared_disk() {
  mkdir -p $DISK && mount -t tmpfs -o size=80M shared $DISK && truncate -s 64M $DISK/img || return 1
  modprobe -q loop 2>/dev/null
  LOOPS=("$(losetup -f --show $DISK/img)" "$(losetup -f --show $DISK/img)")
  [ -b "${LOOPS[1]}" ]
}
