# shellcheck shell=bash
# attach.sh - for `vhost-user` and `boot`, which source it: a target on this machine over two paths, and `nvmf attach` to it.
#
# Of them: NAME, DIRECTORY, NVMFD, NVMF, NQN; LOGS: files whose ends are printed after a failure.
export LC_ALL=C
umask 022

# shellcheck disable=SC2034  # used by those
ADDRESS=127.0.0.1 API=$DIRECTORY/api.sock LOG=$DIRECTORY/nvmfd.log ATTACHED=$DIRECTORY/attach.log TARGET='' HOST=''

say() { printf '%s: %s\n' "$NAME" "$*"; }
die() {
  local log
  say "$*" >&2
  for log in "$ATTACHED" "$LOG" "${LOGS[@]}"; do
    [ ! -s "$log" ] || { printf 'the end of %s:\n' "${log##*/}" >&2; tail -n 20 "$log" | tr -d '\r' | sed 's/^/    /' >&2; }
  done
  exit 1
}
count() { { cat "$1" 2>/dev/null || true; } | grep -ac -- "$2" || true; } # FILE TEXT; no file: 0
live() { count "$ATTACHED" ' is live'; }
await() { # SECONDS FILE COUNT TEXT: until it has so many lines with the text
  local end=$((SECONDS + $1))
  while [ "$(count "$2" "$4")" -lt "$3" ]; do
    [ $SECONDS -lt $end ] || die "no ${3}th line with \"$4\" in ${2##*/} within $1 s"
    sleep 0.1
  done
}

configure() { # PATH SIZE BLOCK_BYTES: of the namespace
  cat >"$DIRECTORY/nvmfd.toml" <<TOML
provider = "soft"
[management]
socket = "$API"
[[listener]]
id = 1
address = "$ADDRESS"
port = 4420
[[listener]]
id = 2
address = "$ADDRESS"
port = 4421
[[subsystem]]
nqn = "$NQN"
allow_any_host = true
[[subsystem.namespace]]
nsid = 1
path = "$1"
size = "$2"
block_size = $3
TOML
}
start_target() {
  : >"$LOG"
  "$NVMFD" --config "$DIRECTORY/nvmfd.toml" >>"$LOG" 2>&1 &
  TARGET=$!
  await 30 "$LOG" 1 serving
}
kill_target() {
  kill -KILL "$TARGET"
  wait "$TARGET" 2>/dev/null || true
  TARGET=''
}
end_target() {
  kill -TERM "$TARGET"
  wait "$TARGET" || die "nvmfd ended with status $?"
  TARGET=''
}
attach() { # EXPORT SOCKET
  "$NVMF" attach --provider soft -a "$ADDRESS" --paths "$ADDRESS:4421" -n "$NQN" -k 1 -c 1 "--$1" "$2" >"$ATTACHED" 2>&1 &
  HOST=$!
  await 30 "$ATTACHED" 2 'is live'
  await 30 "$ATTACHED" 1 'is served'
}
detach() {
  kill -TERM "$HOST"
  wait "$HOST" || die "nvmf attach ended with status $?"
  HOST=''
}
