# shellcheck shell=bash
# The disks behind a target, and the target: ours, in the guest or beside it, or the kernel's. Part of lib.sh.

# make_backing MIB: an ext4 at $BACK on a loop device over tmpfs. tmpfs itself and hostfs refuse O_DIRECT; the loop device
# completes from a kernel thread, as a real disk completes later than it was asked.
make_backing() {
  local loop
  if beside_guest; then
    # the machine's own disk, seen from both sides
    rm -rf /vm/back
    mkdir -p "$BACK" && chmod 777 "$BACK"
    return
  fi
  modprobe -aq loop ext4 2>/dev/null
  mkdir -p "$BACK" /mnt/backfile
  mountpoint -q /mnt/backfile || mount -t tmpfs -o size="$(($1 + 64))M" backfile /mnt/backfile || return 1
  truncate -s "$1M" /mnt/backfile/img
  loop=$(losetup -f --show /mnt/backfile/img) || return 1
  mkfs.ext4 -q -b 4096 -E nodiscard,lazy_itable_init=0,lazy_journal_init=0 -O ^has_journal "$loop" >/dev/null 2>&1 || return 1
  mount "$loop" "$BACK"
}

# make_nullblk NUMBER MIB BLOCKSIZE MEMORY(0|1): prints the device
make_nullblk() {
  local d=/sys/kernel/config/nullb/nullb$1
  modprobe -q null_blk nr_devices=0 2>/dev/null
  mkdir -p "$d" || return 1
  echo "$2" >"$d/size"
  echo "$3" >"$d/blocksize"
  echo 2 >"$d/queue_mode"
  nproc >"$d/submit_queues"
  echo "$4" >"$d/memory_backed"
  if [ "$4" = 1 ]; then echo 1 >"$d/discard"; fi
  echo 1 >"$d/power" || return 1
  if [ -b "/dev/nullb$1" ]; then echo "/dev/nullb$1"; else echo "/dev/nullb$(<"$d/index")"; fi
}

remove_backing() {
  local d
  if beside_guest; then rm -rf /vm/back; fi
  for d in /sys/kernel/config/nullb/nullb*; do
    echo 0 >"$d/power"
    rmdir "$d"
  done
  if mountpoint -q "$BACK"; then
    d=$(findmnt -no SOURCE "$BACK")
    umount "$BACK" || umount -l "$BACK"
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
  add_file 1 "$1" 4096
  if beside_guest; then
    add_file 2 "$2" 512
  else
    local dev
    dev=$(make_nullblk 7 "$2" 512 1) || return 1
    add_ns 2 dev "$dev" "$2" 512
  fi
}

add_file() { # NSID MIB BLOCKSIZE: a file of its own
  truncate -s "$2M" "$BACK/ns$1" && chmod 666 "$BACK/ns$1" && add_ns "$1" file "$BACK/ns$1" "$2" "$3"
}

write_config() { # everything that the daemon's configuration says, from NAMESPACES and HOSTS
  local n nsid kind path mib bs h
  {
    echo "provider = \"$PROVIDER\""
    if [ -n "${STATE:-}" ]; then echo "state_directory = \"$STATE\""; fi
    echo
    echo '[[listener]]'
    echo "address = \"$TADDR\""
    echo "port = $PORT"
    if [ -n "${ANA:-}" ]; then echo "ana = $ANA"; fi
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
          echo "path = \"$(target_path "$path")\""
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
  } >"$CONFIG.new"
  mv "$CONFIG.new" "$CONFIG" # a reload that is late must not read half of it
  cp "$CONFIG" "$LOG/nvmfd.toml"
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
  if beside_guest; then
    start_beside || return 1
  else
    local in_net=()
    if [ -n "$TNETNS" ]; then in_net=(ip netns exec "$TNETNS"); fi
    # no function here: in the background that would be a shell, with the daemon as its child
    # shellcheck disable=SC2086  # NVMFD_ARGS is a list of words
    "${in_net[@]}" "$NVMFD" --config "$CONFIG" ${NVMFD_ARGS:-} >>"$LOG/nvmfd.log" 2>&1 &
    TPID=$!
  fi
  if ! wait_for 15 listening; then
    say "nvmfd does not listen on $TADDR:$PORT; its last words:"
    tail -n 15 "$LOG/nvmfd.log" | sed 's/^/     | /'
    return 1
  fi
}

start_beside() {
  local set='' v
  lend "$NVMFD" || return 1
  chmod 666 "$LOG/nvmfd.log"
  for v in RUST_LOG RUST_BACKTRACE; do
    if [ -n "${!v:-}" ]; then set+=$(printf '%s=%q ' $v "${!v}"); fi
  done
  beside_start "exec env $set $MACHINE_DIR/bin/${NVMFD##*/} --config $(target_path "$CONFIG") ${NVMFD_ARGS:-} >>$(target_path "$LOG/nvmfd.log") 2>&1" || return 1
  TJOB=$JOB TPID=$JOB_PID
}

listening() {
  target_runs || return 0 # died: stop waiting, target_alive tells
  if [ "$PROVIDER" = soft ]; then
    [[ $(at_target ss -Huln) == *:4791\ * ]]
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

target_alive() { if [ "$RUNNING" = kernel ]; then [ -e "$CFG/ports/1/subsystems/$NQN" ]; else target_runs; fi; }

# ---- the daemon's process, wherever it runs ---------------------------------------------------------------------------

at_target() { # runs a command where the daemon runs
  if beside_guest; then beside "$(printf '%q ' "$@")"; else in_target_net "$@"; fi
}
target_path() { if beside_guest; then echo "${1/#\/vm/$MACHINE_DIR}"; else echo "$1"; fi; }
target_runs() {
  if [ -z "$TPID" ]; then return 1; fi
  if beside_guest; then [ ! -e "$TJOB.status" ]; else ! gone "$TPID"; fi
}
target_ended() { ! target_runs; }
target_signal() { # NAME
  if beside_guest; then beside "kill -$1 $TPID"; else kill "-$1" "$TPID"; fi
}
target_status() { # its exit status; waits for it
  if beside_guest; then beside_end "$TJOB"; else wait "$TPID"; fi 2>/dev/null
}
target_rss_kib() { at_target awk '/^VmRSS:/ {print $2}' "/proc/$TPID/status"; }
target_own_kib() { at_target awk '/^Rss(Anon|Shmem):/ {sum += $2} END {print sum}' "/proc/$TPID/status"; } # not its text and libraries
raw_host() { # OTHER-HOST-NQN [OPTION...]
  local address=$TADDR options=()
  if [ "$ADRFAM" = ipv6 ]; then address="[$TADDR]"; fi
  if [ "$LINK" = siw ]; then options=(--iwarp); fi
  timeout -k 5 "${LIMIT:-900}" "$RAW_HOST" "$address:$PORT" "$NQN" "$HOSTNQN" "$1" "${options[@]}" "${@:2}"
}
target_fds() { at_target find "/proc/$TPID/fd" -mindepth 1 -maxdepth 1 | wc -l; }
target_threads() { at_target find "/proc/$TPID/task" -mindepth 1 -maxdepth 1 | wc -l; }
target_ticks() { # user and system time of the process with all its threads, in clock ticks (100 a second)
  local f
  f=$(at_target cat "/proc/$TPID/stat")
  # shellcheck disable=SC2086  # fields after the name
  set -- ${f##*) }
  echo $((${12} + ${13}))
}
target_cpu_us() { # the same in microseconds, where the kernel counts more than ticks
  # shellcheck disable=SC2016  # awk's
  at_target sh -c "cat /proc/$TPID/task/*/schedstat" 2>/dev/null | awk '{ns += $1} END {if (NR) printf "%.0f", ns / 1000}'
}
target_sleeps() { # how many times its threads have begun to sleep
  # shellcheck disable=SC2016  # awk's
  at_target sh -c "cat /proc/$TPID/task/*/status" 2>/dev/null | awk '/^voluntary_ctxt/ {n += $2} END {print n + 0}'
}
target_pools_kib() { # what it says at start that its pools take
  sed -n 's/.* pool \([0-9.]*\) MiB.*/\1/p' "$LOG/nvmfd.log" | tail -n 1 | awk '{printf "%.0f", $1 * 1024}'
}
gone() { [ ! -e "/proc/$1" ] || grep -q '^State:.*Z' "/proc/$1/status" 2>/dev/null; }

# ---- the kernel's target ----------------------------------------------------------------------------------------------

start_kernel() {
  local n nsid kind path mib bs d s=$CFG/subsystems/$NQN h
  if [ "$PROVIDER" = soft ]; then say "the kernel's target has no soft transport"; return 1; fi
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
  if [ ! -d "$CFG"/ports/1 ]; then
    mkdir "$CFG"/ports/1
    echo rdma >"$CFG"/ports/1/addr_trtype
    echo "$ADRFAM" >"$CFG"/ports/1/addr_adrfam
    echo "$TADDR" >"$CFG"/ports/1/addr_traddr
    echo "$PORT" >"$CFG"/ports/1/addr_trsvcid
  fi
  ln -s "$s" "$CFG/ports/1/subsystems/$NQN"
}

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

# ---- either -----------------------------------------------------------------------------------------------------------

# The target vanishes without a word: kill -9 (the kernel's target: it drops its connections and stops listening).
kill_target() {
  if [ "$RUNNING" = kernel ]; then
    rm -f "$CFG/ports/1/subsystems/$NQN"
  else
    target_signal KILL
    target_status
  fi
  return 0
}

# Ask it to end, and wait; STOP_MS says how long that took. 1 when it had to be killed.
stop_target() {
  local t0 rc=0
  t0=$(now_ms)
  if [ -n "$TPID" ]; then
    if target_runs; then
      target_signal TERM
      wait_for 20 target_ended || { target_signal KILL; rc=1; }
      target_status
      STOP_STATUS=$?
    fi
    TPID=''
  fi
  if [ -d "$CFG/subsystems" ]; then stop_kernel; fi
  STOP_MS=$(($(now_ms) - t0))
  return $rc
}

begin() { # LINK, from the environment or the flow; then the target with the namespaces that were added
  setup_link "$LINK" || { fail "the link $LINK comes up"; finish; }
  if ! start_target || ! target_alive; then
    fail "the target starts" "$(tail -n 10 "$LOG/nvmfd.log" 2>/dev/null)"
    finish
  fi
  pass "target $TARGET serves on $LINK (ready after $START_MS ms)"
  if beside_guest; then
    is "the target is an ordinary user's, without any capability" \
      "$(at_target awk '/^Uid:/ {u = $3} /^Cap(Eff|Prm|Bnd|Inh|Amb):/ {c = c $2} END {print (u == 0 ? "root" : "user"), (c ~ /^0+$/ ? "none" : c)}' "/proc/$TPID/status")" "user none"
  fi
  # shellcheck disable=SC2086  # a list of words
  if [ -n "${NETEM:-}" ]; then expect "the wire is impaired: $NETEM" impair $NETEM; fi
}
