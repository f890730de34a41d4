# shellcheck shell=bash
# What the flows share: the link, the disks behind a target, the target itself (ours or the kernel's), the host's view, checks.
#
# A flow is a script that sources this, is run inside a guest, and ends with `finish`. It prints one line per check:
#   `ok   ...` / `FAIL ...`, free lines starting with `     `, and a closing `N passed, N failed`.
# Parameters come from the environment:
#   TARGET   nvmfd | kernel (the kernel's nvmet-rdma: the reference, every flow passes against it)
#   NVMFD    path of the daemon                       LINK  rxe | siw | veth-rxe | soft, see setup_link
#   SECS     length of timed parts (SECONDS is bash's own), ROUNDS  repetitions         LOG  directory for logs
# bash's SECONDS counts up by itself; nothing here waits without a bound.
set -uo pipefail
shopt -s nullglob

FLOW=$(basename "$0")
FLOW=${FLOW#flow-}
TARGET=${TARGET:-nvmfd}
LINK=${LINK:-rxe}
LOG=${LOG:-/vm/log}/$FLOW
NVMFD=${NVMFD:-}
NQN=nqn.2026-11.io.nvmfd:vm
PORT=4420
HOSTID=5b1c9d3e-7a52-4c1f-9a3e-000000000001
HOSTNQN=nqn.2014-08.org.nvmexpress:uuid:$HOSTID
TADDR=10.77.0.1 # the target's address
HADDR=10.77.0.2 # the host's, where it has one of its own
TNETNS=''       # network namespace that the target runs in, on the soft link
BACK=/mnt/back  # an ext4 with O_DIRECT for namespace files
CFG=/sys/kernel/config/nvmet
WORK=$(mktemp -d /tmp/flow.XXXXXX)
TPID=''
PASS=0 FAILS=0 FINISHED='' T0=$(date +%s%N)
NAMESPACES=() # nsid|file,dev,ram,null|path|size in MiB|block size
HOSTS=()      # host NQNs that are allowed; empty: any
mkdir -p "$LOG"

# ---- checks -----------------------------------------------------------------------------------------------------------

say() { printf '     %s\n' "$*"; }
pass() {
  PASS=$((PASS + 1))
  printf 'ok   %s\n' "$*"
}
fail() { # DESCRIPTION [DETAIL...]: detail lines are shown, too
  FAILS=$((FAILS + 1))
  printf 'FAIL %s\n' "$1"
  shift
  if [ $# -gt 0 ]; then printf '%s\n' "$@" | tail -n 12 | sed 's/^/     | /'; fi
}

# The command ran for at most 120 s (LIMIT overrides), its output is in $OUT, its status in $RC.
run() {
  RC=0
  if [ "$(type -t "$1")" = function ]; then
    "$@" >"$WORK/out" 2>&1 || RC=$?
  else
    timeout -k 5 "${LIMIT:-120}" "$@" >"$WORK/out" 2>&1 || RC=$?
  fi
  { OUT=$(<"$WORK/out"); } 2>/dev/null # bash drops NULs, and says so
  printf '## %s\n%s\n## status %d\n' "$*" "${OUT:0:20000}" $RC >>"$LOG/commands"
  return 0
}

expect() { # DESCRIPTION COMMAND...: the command succeeds
  local desc=$1
  shift
  run "$@"
  if [ $RC = 0 ]; then pass "$desc"; else fail "$desc (status $RC: $*)" "$OUT"; fi
}

expect_fail() { # DESCRIPTION COMMAND...: the command fails
  local desc=$1
  shift
  run "$@"
  if [ $RC != 0 ]; then pass "$desc"; else fail "$desc (it succeeded: $*)" "$OUT"; fi
}

expect_out() { # DESCRIPTION REGEX COMMAND...: the command succeeds and its output matches
  local desc=$1 regex=$2
  shift 2
  run "$@"
  if [ $RC != 0 ]; then
    fail "$desc (status $RC: $*)" "$OUT"
  elif grep -qE -- "$regex" <<<"$OUT"; then
    pass "$desc"
  else
    fail "$desc (no match for /$regex/)" "$OUT"
  fi
}

expect_json() { # DESCRIPTION JQ-FILTER COMMAND...: the command prints JSON for which the filter is true
  local desc=$1 filter=$2
  shift 2
  run "$@"
  if [ $RC != 0 ]; then
    fail "$desc (status $RC: $*)" "$OUT"
  elif jq -e "$filter" >/dev/null 2>&1 <<<"$OUT"; then
    pass "$desc"
  else
    fail "$desc (not so: $filter)" "$(jq -c . <<<"$OUT" 2>&1 | cut -c1-1500)"
  fi
}

# DESCRIPTION STATUS COMMAND...: nvme-cli reports this NVMe status. STATUS is type and code in hex (285: compare failure), with
# `+D` when do-not-retry must be set, `+d` when it must be clear, and alternatives separated by `|`.
expect_status() {
  local desc=$1 want=$2 got w dnr
  shift 2
  run "$@"
  got=$(grep -oE '\(?(0x)?[0-9a-fA-F]{1,4}\)?' <<<"$(grep -iE 'status' <<<"$OUT" | head -1)" | tr -d '()' | grep -E '^0x' | tail -1 || true)
  if [ -z "$got" ]; then got=$(grep -oE '\(0x[0-9a-fA-F]+\)' <<<"$OUT" | tail -1 | tr -d '()' || true); fi
  if [ -z "$got" ]; then
    fail "$desc (no NVMe status; exit status $RC: $*)" "$OUT"
    return
  fi
  for w in ${want//|/ }; do
    dnr=''
    case $w in *+D) dnr=1 ;; *+d) dnr=0 ;; esac
    w=$((16#${w%+*}))
    if [ $((got & 0x7ff)) = $w ] && { [ -z "$dnr" ] || [ $(((got >> 14) & 1)) = $dnr ]; }; then
      pass "$desc: $(printf '0x%x' "$got")"
      return
    fi
  done
  fail "$desc (status $got, wanted $want)" "$OUT"
}

is() { # DESCRIPTION GOT WANTED
  if [ "$2" = "$3" ]; then pass "$1"; else fail "$1 (is \"$2\", should be \"$3\")"; fi
}

holds() { # DESCRIPTION EXPRESSION: an arithmetic condition, such as "$after > $before"
  if (($2)); then pass "$1 ($2)"; else fail "$1 (not so: $2)"; fi
}

wait_for() { # SECONDS COMMAND...: until it succeeds
  local end=$((SECONDS + $1))
  shift
  while ! "$@" >/dev/null 2>&1; do
    if [ $SECONDS -ge $end ]; then return 1; fi
    sleep 0.05
  done
}

now_ms() { echo $(($(date +%s%N) / 1000000)); }

finish() {
  FINISHED=1
  exit 0
}

at_exit() {
  local rc=$? bad
  trap - EXIT
  if [ -z "$FINISHED" ]; then fail "the flow ended early (status $rc)"; fi
  run timeout -k 5 60 nvme disconnect-all
  stop_target || fail "the target could not be stopped"
  remove_backing
  # a fault in the kernel is a failed check, whoever caused it
  bad=$(dmesg | tail -n "+$((DMESG + 1))" | grep -E 'BUG:|WARNING:|Oops|general protection|hung_task|blocked for more|Call Trace|Kernel panic' | head -5)
  dmesg | tail -n "+$((DMESG + 1))" >"$LOG/dmesg"
  if [ -n "$bad" ]; then fail "the guest's kernel complains" "$bad"; fi
  if [ "$TARGET" = nvmfd ] && grep -aqE "panicked at|stack overflow" "$LOG/nvmfd.log" 2>/dev/null; then
    fail "nvmfd panicked" "$(grep -aE -A3 'panicked at|stack overflow' "$LOG/nvmfd.log")"
  fi
  rm -rf "$WORK"
  say "$FLOW took $((($(date +%s%N) - T0) / 1000000000)) s"
  printf '%d passed, %d failed\n' $PASS $FAILS
  [ $FAILS = 0 ] || exit 1
  exit 0
}
DMESG=$(dmesg | wc -l)
trap at_exit EXIT

# ---- link -------------------------------------------------------------------------------------------------------------

# setup_link KIND
#   rxe       one Soft-RoCE device; the host connects to the guest's own address (the device loops packets back)
#   siw       one Soft-iWARP device, the same (uml only)
#   veth-rxe  two Soft-RoCE devices, one on each end of a veth pair: real frames on the wire, for capture and for loss
#   soft      a Soft-RoCE device for the host; the target's end of the veth pair is in a network namespace of its own, where
#             there is no RDMA device: for nvmfd's own transport (rxe knows the first namespace only)
setup_link() {
  local kind=$1 mtu=${MTU:-9000} d
  if [ "$(cat /run/link 2>/dev/null)" = "$kind-$mtu" ]; then
    link_names "$kind"
    return 0
  fi
  teardown_link
  link_names "$kind"
  modprobe -aq dummy veth rdma_rxe ib_uverbs rdma_ucm 2>/dev/null
  case $kind in
    rxe | siw)
      ip link add d0 type dummy || return 1
      ip link set d0 mtu "$mtu" up
      ip addr add $TADDR/24 dev d0
      rdma link add "${kind}0" type "$kind" netdev d0 || return 1
      ;;
    veth-rxe | soft)
      # rxe knows the first network namespace only, so both ends of veth-rxe live there, and policy routing, which puts the
      # table of local addresses last, keeps the traffic between two addresses of one machine on the wire
      ip link add v0 address 52:54:00:00:77:02 type veth peer name v1 address 52:54:00:00:77:01 || return 1
      ip link set v0 mtu "$mtu" up
      ip addr add $HADDR/24 dev v0
      if [ "$kind" = soft ]; then
        ip netns add target
        ip link set v1 netns target
        ip -n target link set lo up
        ip -n target link set v1 mtu "$mtu" up
        ip -n target addr add $TADDR/24 dev v1
        ip -n target neigh replace $HADDR lladdr 52:54:00:00:77:02 dev v1
        ip neigh replace $TADDR lladdr 52:54:00:00:77:01 dev v0
        rdma link add rxe0 type rxe netdev v0 || return 1
      else
        ip link set v1 mtu "$mtu" up
        ip addr add $TADDR/24 dev v1
        for d in v0 v1; do echo 1 >/proc/sys/net/ipv6/conf/$d/disable_ipv6; done
        for d in all v0 v1; do
          echo 1 >/proc/sys/net/ipv4/conf/$d/accept_local
          echo 0 >/proc/sys/net/ipv4/conf/$d/rp_filter
          echo 1 >/proc/sys/net/ipv4/conf/$d/arp_ignore
        done
        # one CPU receives, or frames overtake each other between CPUs, which to a connection is loss; and none is dropped
        for d in v0 v1; do echo 1 >/sys/class/net/$d/queues/rx-0/rps_cpus; done 2>/dev/null
        echo 20000 >/proc/sys/net/core/netdev_max_backlog
        # known neighbours: an ARP answer that is faster than the kernel's own queue costs 3 s at the first connect
        ip neigh replace $TADDR lladdr 52:54:00:00:77:01 dev v0
        ip neigh replace $HADDR lladdr 52:54:00:00:77:02 dev v1
        ip route add $TADDR dev v0 src $HADDR table 101
        ip route add $HADDR dev v1 src $TADDR table 102
        for d in lo v0; do ip rule add pref 10 iif $d to $TADDR lookup 101; done
        for d in lo v1; do ip rule add pref 10 iif $d to $HADDR lookup 102; done
        ip rule add pref 100 lookup local
        while ip rule del pref 0 2>/dev/null; do :; done
        rdma link add rxe0 type rxe netdev v0 || return 1
        rdma link add rxe1 type rxe netdev v1 || return 1
      fi
      ;;
    *) return 1 ;;
  esac
  sleep 0.3
  echo "$kind-$mtu" >/run/link
}

link_names() {
  TNETNS=''
  PROVIDER=verbs
  if [ "$1" = soft ]; then TNETNS=target PROVIDER=soft; fi
}

teardown_link() {
  local l
  rm -f /run/link
  for l in /sys/class/infiniband/*; do rdma link delete "${l##*/}" 2>/dev/null; done
  # (`| grep -q` would end the writer by a signal, and pipefail would take that for "no")
  if [[ $(ip rule show) != 0:* ]]; then ip rule add pref 0 lookup local; fi
  ip rule del pref 100 2>/dev/null
  while ip rule del pref 10 2>/dev/null; do :; done
  for l in d0 v0; do ip link del $l 2>/dev/null; done
  if [ -e /run/netns/target ]; then ip netns del target; fi
  ip route flush table 101 2>/dev/null
  ip route flush table 102 2>/dev/null
  return 0
}

in_target_net() { if [ -n "$TNETNS" ]; then ip netns exec "$TNETNS" "$@"; else "$@"; fi; }

# ---- disks ------------------------------------------------------------------------------------------------------------

# make_backing MIB: an ext4 at $BACK on a loop device over tmpfs. tmpfs itself and hostfs refuse O_DIRECT; the loop device
# completes from a kernel thread, as a real disk completes later than it was asked.
make_backing() {
  local loop
  modprobe -aq loop ext4 2>/dev/null
  mkdir -p $BACK /mnt/backfile
  mountpoint -q /mnt/backfile || mount -t tmpfs -o size="$(($1 + 64))M" backfile /mnt/backfile || return 1
  truncate -s "$1M" /mnt/backfile/img
  loop=$(losetup -f --show /mnt/backfile/img) || return 1
  mkfs.ext4 -q -b 4096 -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 -O ^has_journal "$loop" >/dev/null 2>&1 || return 1
  mount "$loop" $BACK
}

# make_nullblk NUMBER MIB BLOCKSIZE MEMORY(0|1): prints the device
make_nullblk() {
  local d=/sys/kernel/config/nullb/nullb$1
  modprobe -q null_blk nr_devices=0 2>/dev/null
  mkdir -p "$d" || return 1
  echo "$2" >"$d/size"
  echo "$3" >"$d/blocksize"
  echo 2 >"$d/queue_mode"
  echo "$(nproc)" >"$d/submit_queues"
  echo "$4" >"$d/memory_backed"
  if [ "$4" = 1 ]; then echo 1 >"$d/discard"; fi
  echo 1 >"$d/power" || return 1
  if [ -b "/dev/nullb$1" ]; then echo "/dev/nullb$1"; else echo "/dev/nullb$(<"$d/index")"; fi
}

remove_backing() {
  local d
  for d in /sys/kernel/config/nullb/nullb*; do
    echo 0 >"$d/power"
    rmdir "$d"
  done
  if mountpoint -q $BACK; then
    d=$(findmnt -no SOURCE $BACK)
    umount $BACK || umount -l $BACK
    losetup -d "$d" 2>/dev/null
  fi
  if mountpoint -q /mnt/backfile; then umount /mnt/backfile || umount -l /mnt/backfile; fi
  return 0
}

# ---- target -----------------------------------------------------------------------------------------------------------

# add_ns NSID KIND PATH MIB BLOCKSIZE, before start_target (or before write_config and a reload)
add_ns() { NAMESPACES+=("$1|$2|$3|$4|$5"); }

# the two namespaces that most flows serve: a file with 4096-byte blocks and a block device with 512-byte blocks
standard_namespaces() { # MIB of the file, MIB of the device
  make_backing $(($1 * 5 / 4 + 64)) || return 1
  local dev
  dev=$(make_nullblk 7 "$2" 512 1) || return 1
  truncate -s "$1M" $BACK/ns1
  add_ns 1 file $BACK/ns1 "$1" 4096
  add_ns 2 dev "$dev" "$2" 512
}

write_config() { # everything that the daemon's configuration says, from NAMESPACES and HOSTS
  local n nsid kind path mib bs h
  {
    echo "provider = \"$PROVIDER\""
    echo
    echo '[[listener]]'
    echo "address = \"$TADDR\""
    echo "port = $PORT"
    echo
    echo '[[subsystem]]'
    echo "nqn = \"$NQN\""
    if [ ${#HOSTS[@]} = 0 ]; then
      echo 'allow_any_host = true'
    else
      echo 'allow_any_host = false'
      printf 'hosts = ['
      for h in "${HOSTS[@]}"; do printf '"%s", ' "$h"; done
      echo ']'
    fi
    for n in "${NAMESPACES[@]}"; do
      IFS='|' read -r nsid kind path mib bs <<<"$n"
      echo
      echo '[[subsystem.namespace]]'
      echo "nsid = $nsid"
      case $kind in
        file)
          echo "path = \"$path\""
          echo "size = \"${mib}MiB\""
          ;;
        dev) echo "path = \"$path\"" ;;
        *)
          echo "kind = \"$kind\""
          echo "size = \"${mib}MiB\""
          ;;
      esac
      echo "block_size = $bs"
    done
    if [ -n "${EXTRA_CONFIG:-}" ]; then printf '\n%s\n' "$EXTRA_CONFIG"; fi
  } >/run/nvmfd.toml
  cp /run/nvmfd.toml "$LOG/nvmfd.toml"
}

start_target() { # [kernel|nvmfd]; afterwards it accepts connections
  local t0
  t0=$(now_ms)
  RUNNING=${1:-$TARGET}
  if [ "$RUNNING" = kernel ]; then start_kernel; else start_nvmfd; fi || return 1
  START_MS=$(($(now_ms) - t0))
}

start_nvmfd() {
  [ -x "$NVMFD" ] || { say "no daemon at NVMFD=$NVMFD"; return 1; }
  write_config
  printf '## start\n' >>"$LOG/nvmfd.log"
  local in_net=()
  if [ -n "$TNETNS" ]; then in_net=(ip netns exec "$TNETNS"); fi
  # no function here: in the background that would be a shell, with the daemon as its child
  # shellcheck disable=SC2086  # NVMFD_ARGS is a list of words
  "${in_net[@]}" "$NVMFD" --config /run/nvmfd.toml ${NVMFD_ARGS:-} >>"$LOG/nvmfd.log" 2>&1 &
  TPID=$!
  if ! wait_for 15 listening; then
    say "nvmfd does not listen on $TADDR:$PORT; its last words:"
    tail -n 15 "$LOG/nvmfd.log" | sed 's/^/     | /'
    return 1
  fi
}

listening() {
  kill -0 "$TPID" 2>/dev/null || return 0 # died: stop waiting, target_alive tells
  if [ "$PROVIDER" = soft ]; then
    [[ $(in_target_net ss -Huln) == *:4791\ * ]]
  else
    # a listener of this process; the kernel names the thread that made it
    local line thread
    while read -r line; do
      thread=${line#* pid }
      if [[ $line == *LISTEN* && -e /proc/$TPID/task/${thread%% *} ]]; then return 0; fi
    done <<<"$(rdma resource show cm_id 2>/dev/null)"
    return 1
  fi
}

target_alive() { if [ "$RUNNING" = kernel ]; then [ -e "$CFG/ports/1/subsystems/$NQN" ]; else [ -n "$TPID" ] && kill -0 "$TPID" 2>/dev/null; fi; }

start_kernel() {
  local n nsid kind path mib bs d s=$CFG/subsystems/$NQN h
  if [ -n "$TNETNS" ]; then say "the kernel's target has no soft transport"; return 1; fi
  modprobe -aq nvmet nvmet-rdma 2>/dev/null
  if [ ! -d "$s" ]; then
    mkdir "$s" || return 1
    echo NVMFDVM >"$s/attr_serial"
    for n in "${NAMESPACES[@]}"; do
      IFS='|' read -r nsid kind path mib bs <<<"$n"
      case $kind in
        ram) path=$(make_nullblk $((100 + nsid)) "$mib" "$bs" 1) ;;
        null) path=$(make_nullblk $((100 + nsid)) "$mib" "$bs" 0) ;;
      esac
      d=$s/namespaces/$nsid
      mkdir "$d"
      printf %s "$path" >"$d/device_path"
      if [ "$kind" = file ]; then echo 0 >"$d/buffered_io"; fi
      echo 1 >"$d/enable" || return 1
    done
    if [ ${#HOSTS[@]} = 0 ]; then
      echo 1 >"$s/attr_allow_any_host"
    else
      echo 0 >"$s/attr_allow_any_host"
      for h in "${HOSTS[@]}"; do
        mkdir -p "$CFG/hosts/$h"
        ln -s "$CFG/hosts/$h" "$s/allowed_hosts/"
      done
    fi
  fi
  if [ ! -d $CFG/ports/1 ]; then
    mkdir $CFG/ports/1
    echo rdma >$CFG/ports/1/addr_trtype
    echo ipv4 >$CFG/ports/1/addr_adrfam
    echo $TADDR >$CFG/ports/1/addr_traddr
    echo $PORT >$CFG/ports/1/addr_trsvcid
  fi
  ln -s "$s" "$CFG/ports/1/subsystems/$NQN"
}

# The target vanishes without a word: kill -9 (the kernel's target: it drops its connections and stops listening).
kill_target() {
  if [ "$RUNNING" = kernel ]; then
    rm -f "$CFG/ports/1/subsystems/$NQN"
  else
    kill -9 "$TPID" 2>/dev/null
    wait "$TPID" 2>/dev/null
  fi
  return 0
}

# Ask it to end, and wait; STOP_MS says how long that took. 1 when it had to be killed.
stop_target() {
  local t0 rc=0
  t0=$(now_ms)
  if [ -n "$TPID" ]; then
    if kill -0 "$TPID" 2>/dev/null; then
      kill -TERM "$TPID"
      wait_for 20 gone "$TPID" || { kill -9 "$TPID"; rc=1; }
      wait "$TPID" 2>/dev/null
      STOP_STATUS=$?
    fi
    TPID=''
  fi
  if [ -d "$CFG/subsystems" ]; then stop_kernel; fi
  STOP_MS=$(($(now_ms) - t0))
  return $rc
}

gone() { [ ! -e "/proc/$1" ] || grep -q '^State:.*Z' "/proc/$1/status" 2>/dev/null; }

stop_kernel() {
  local s=$CFG/subsystems/$NQN d h
  for d in "$CFG"/ports/*/subsystems/*; do rm -f "$d"; done
  for d in "$CFG"/ports/*; do rmdir "$d"; done
  for h in "$s"/allowed_hosts/*; do rm -f "$h"; done
  for d in "$s"/namespaces/*; do
    echo 0 >"$d/enable"
    rmdir "$d"
  done
  if [ -d "$s" ]; then rmdir "$s"; fi
  for h in "$CFG"/hosts/*; do rmdir "$h"; done
  return 0
}

begin() { # LINK, from the environment or the flow; then the target with the namespaces that were added
  setup_link "$LINK" || { fail "the link $LINK comes up"; finish; }
  if ! start_target || ! target_alive; then
    fail "the target starts" "$(tail -n 10 "$LOG/nvmfd.log" 2>/dev/null)"
    finish
  fi
  pass "target $TARGET serves on $LINK (ready after $START_MS ms)"
}

# ---- the host's view --------------------------------------------------------------------------------------------------

host_args() { printf '%s\n' -t rdma -a "$TADDR" -s "$PORT" --hostnqn="$HOSTNQN" --hostid="$HOSTID"; }

nvme_f() { # nvme-cli's fabrics commands with address and host: nvme_f discover ...
  local args
  mapfile -t args < <(host_args)
  timeout -k 5 90 nvme "$@" "${args[@]}"
}

connect_host() { nvme_f connect -n "$NQN" "$@"; }
disconnect_host() { timeout -k 5 60 nvme disconnect -n "${1:-$NQN}"; }

controller() { # [NQN]: its device name, such as nvme0
  local c
  for c in /sys/class/nvme/nvme*; do
    if [ "$(cat "$c/subsysnqn" 2>/dev/null)" = "${1:-$NQN}" ]; then
      echo "${c##*/}"
      return 0
    fi
  done
  return 1
}

namespace_dev() { # NSID [NQN]: the block device, such as /dev/nvme0n1, once it is there
  local b n
  for b in /sys/block/nvme*; do
    n=${b##*/}
    [[ $n =~ ^nvme[0-9]+n[0-9]+$ ]] || continue
    if [ "$(cat "$b/device/subsysnqn" 2>/dev/null)" = "${2:-$NQN}" ] && [ "$(cat "$b/nsid" 2>/dev/null)" = "$1" ] && [ -b "/dev/$n" ]; then
      # a capacity of 0 is a namespace whose format is not known yet
      if [ "$(<"$b/size")" != 0 ]; then
        echo "/dev/$n"
        return 0
      fi
    fi
  done
  return 1
}

# A program that opens /dev/nvme0n1 as root before it is there makes a plain file of that name, and is happy with it.
wait_block_dev() { wait_for "${3:-15}" namespace_dev "$1" "${2:-$NQN}" && namespace_dev "$1" "${2:-$NQN}"; }

controller_live() { [ "$(cat "/sys/class/nvme/$(controller "${1:-$NQN}")/state" 2>/dev/null)" = live ]; }

io_queues() { # how many I/O queues a controller has
  local q
  q=$(cat "/sys/class/nvme/$1/queue_count" 2>/dev/null) || return 1
  echo $((q - 1))
}

# ---- load -------------------------------------------------------------------------------------------------------------

engine() { echo "${ENGINE:-libaio}"; }

# fio_check DESCRIPTION NAME ARGS...: fio ends in time and without an error. The result is in $LOG/NAME.json.
fio_check() {
  local desc=$1 name=$2
  shift 2
  fio_start "$name" "$@"
  fio_end "$desc" "$name"
}

fio_start() { # NAME ARGS...: in the background
  local name=$1
  shift
  printf '## fio %s\n' "$*" >>"$LOG/commands"
  timeout -k 5 "${LIMIT:-600}" fio --name="$name" --output-format=json --output="$LOG/$name.json" --direct=1 \
    --ioengine="$(engine)" --eta=never "$@" >"$LOG/$name.log" 2>&1 </dev/null &
  FIO=$!
}

fio_end() { # DESCRIPTION NAME: wait for it and judge
  local rc=0 json=$LOG/$2.json sum
  wait "$FIO" || rc=$?
  # fio may put plain lines before its JSON
  sed -i '0,/^{/{/^{/!d}' "$json" 2>/dev/null
  sum=$(jq -r '[.jobs[].error] | map(select(. != 0)) | length' "$json" 2>/dev/null || echo none)
  if [ $rc = 0 ] && [ "$sum" = 0 ]; then
    pass "$1: $(fio_line "$json")"
  else
    fail "$1 (fio status $rc)" "$(tail -n 8 "$LOG/$2.log" 2>/dev/null)" "$(jq -c '[.jobs[] | {jobname, error}]' "$json" 2>&1 | head -c 600)"
  fi
}

fio_line() {
  jq -r '[.jobs[].read.total_ios, .jobs[].write.total_ios, .jobs[].trim.total_ios] as $n
    | "\([.jobs[].read.io_bytes] | add / 1048576 | floor) MiB read, \([.jobs[].write.io_bytes] | add / 1048576 | floor) MiB written, \([.jobs[].trim.total_ios] | add) trims, \($n | add) I/Os"' "$1" 2>/dev/null
}

rss_kib() { awk '/^VmRSS:/ {print $2}' "/proc/$1/status"; }
fd_count() { find "/proc/$1/fd" -mindepth 1 -maxdepth 1 | wc -l; }
cpu_ticks() { # user and system time of a process with all its threads, in clock ticks (100 a second)
  local f
  f=$(<"/proc/$1/stat")
  # shellcheck disable=SC2086  # fields after the name
  set -- ${f##*) }
  echo $((${12} + ${13}))
}
