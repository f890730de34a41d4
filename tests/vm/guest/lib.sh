# shellcheck shell=bash
# What the flows share: the link, the disks behind a target, the target itself (ours or the kernel's), the host's view, checks.
#
# A flow is a script that sources this, is run inside a guest, and ends with `finish`. It prints one line per check:
#   `ok   ...` / `FAIL ...`, free lines starting with `     `, and a closing `N passed, N failed`.
# Parameters come from the environment:
#   TARGET   nvmfd | kernel (the kernel's nvmet-rdma: the reference, every flow passes against it)
#   NVMFD    path of the daemon                       LINK  rxe | siw | veth-rxe | soft | tap, see setup_link
#   ADDR_FAMILY  4 | 6                                NETEM what `tc netem` does to the wire all the time (impair)
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
RAW_HOST=${RAW_HOST:-${NVMFD%/*}/raw_host}
NQN=nqn.2026-11.io.nvmfd:vm
PORT=4420
HOSTID=5b1c9d3e-7a52-4c1f-9a3e-000000000001
HOSTNQN=nqn.2014-08.org.nvmexpress:uuid:$HOSTID
BACK=/mnt/back # a directory with O_DIRECT for namespace files
CONFIG=/run/nvmfd.toml
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

# Of the kernel's messages those that report a fault. Not one of the host in 6.12 that has nothing to do with the target: the scan
# of namespaces removes one in a work queue for memory reclaim, and waits there for another queue when RCU is late.
kernel_faults() {
  sed '/WARNING:.*check_flush_dependency/ { N; /nvme_scan_work is flushing .*srcu_drive_gp/!b; :more; N; /end trace/!b more; d }' |
    grep -E 'BUG:|WARNING:|Oops|general protection|hung_task|blocked for more|Call Trace|Kernel panic'
}

at_exit() {
  local rc=$? bad
  trap - EXIT
  if [ -z "$FINISHED" ]; then fail "the flow ended early (status $rc)"; fi
  run timeout -k 5 60 nvme disconnect-all
  stop_target || fail "the target could not be stopped"
  if beside_guest; then beside_clear; fi
  remove_backing
  if [ -n "$WIRE" ]; then impair; fi
  # a fault in the kernel is a failed check, with any cause
  bad=$(dmesg | tail -n "+$((DMESG + 1))" | kernel_faults | head -5)
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

here=$(dirname "${BASH_SOURCE[0]}")
. "$here/link.sh"
. "$here/target.sh"
. "$here/beside.sh"
link_names "$LINK"

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

# Commands that have ended at the devices of the host's controllers, by the kernel's own count.
commands_done() {
  local stat reads writes sum=0
  for stat in /sys/block/nvme*/stat; do
    read -r reads _ _ _ writes _ <"$stat" && sum=$((sum + reads + writes))
  done
  echo "$sum"
}
has_done() { [ "$(commands_done)" -ge "$1" ]; } # COUNT
# under_way [COUNT]: so many commands more have ended, which is what a load that is under way does
under_way() { wait_for 30 has_done $(($(commands_done) + ${1:-64})); }

fio_stop() { # DESCRIPTION NAME: it has run for long enough
  # once: `timeout` would pass the signal on twice, and fio's second thread gives up at the second
  kill -INT "$(pgrep -o -P "$FIO")"
  fio_end "$1" "$2" 128
}

fio_end() { # DESCRIPTION NAME [STATUS]: wait for it and judge
  local rc=0 json=$LOG/$2.json sum
  wait "$FIO" || rc=$?
  # fio may put plain lines before its JSON
  sed -i '0,/^{/{/^{/!d}' "$json" 2>/dev/null
  sum=$(jq -r '[.jobs[].error] | map(select(. != 0)) | length' "$json" 2>/dev/null || echo none)
  if [ $rc = "${3:-0}" ] && [ "$sum" = 0 ]; then
    pass "$1: $(fio_line "$json")"
  else
    fail "$1 (fio status $rc)" "$(tail -n 8 "$LOG/$2.log" 2>/dev/null)" "$(jq -c '[.jobs[] | {jobname, error}]' "$json" 2>&1 | head -c 600)"
  fi
}

fio_line() {
  jq -r '[.jobs[].read.total_ios, .jobs[].write.total_ios, .jobs[].trim.total_ios] as $n
    | "\([.jobs[].read.io_bytes] | add / 1048576 | floor) MiB read, \([.jobs[].write.io_bytes] | add / 1048576 | floor) MiB written, \([.jobs[].trim.total_ios] | add) trims, \($n | add) I/Os"' "$1" 2>/dev/null
}
