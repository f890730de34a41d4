# shellcheck shell=bash
# steps.sh - for demonstrations, which source it with their arguments: a directory of their own in the first one or here, a target,
# and commands with what they print.
#
#   NVMFD=path/to/nvmfd NVMFCTL=path/to/nvmfctl NVMF=path/to/nvmf DEMONSTRATION [DIR]
export LC_ALL=C
umask 022

NVMFD=${NVMFD:?path of the daemon} NVMFCTL=${NVMFCTL:?path of its tool} NVMF=${NVMF:?path of the host tool}
# The target, and a host that runs beside the script.
PID='' HOST='' DIR=$(mktemp -d "${1:-$PWD}/demo.XXXXXX")
LOG=$DIR/nvmfd.log CONFIG=$DIR/nvmfd.toml
export NVMFD_SOCKET=$DIR/nvmfd.sock

if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' plain=$'\e[0m'; else bold='' dim='' plain=''; fi
step() { printf '\n%s%s%s\n' "$bold" "$*" "$plain"; }
shown() { printf '  %s$ %s%s\n' "$dim" "$(sed "s|$NVMFD|nvmfd|; s|$NVMFCTL|nvmfctl|; s|$NVMF|nvmf|; s|$DIR/||g" <<<"$*")" "$plain"; }
told() { sed "s|$DIR/||g; s/^/    /"; }
show() { # the command, as a person would type it, and what it says
  shown "$@"
  "$@" 2>&1 | told
}
die() {
  printf '\ndemo: %s\n' "$*" >&2
  if [ -s "$LOG" ]; then
    printf 'the last lines of the log:\n' >&2
    tail -n 15 "$LOG" | sed 's/^/    /' >&2
  fi
  exit 1
}
at_exit() {
  local rc=$? pid
  trap - EXIT
  for pid in $PID $HOST; do kill -KILL "$pid" 2>/dev/null || true; done
  rm -rf "$DIR"
  if [ $rc != 0 ]; then printf '\nThe demonstration has failed (status %d).\n' "$rc" >&2; fi
  exit $rc
}
trap at_exit EXIT
start() { # the daemon, until it serves
  : >"$LOG"
  "$NVMFD" --config "$CONFIG" >"$LOG" 2>&1 &
  PID=$!
  for _ in $(seq 100); do
    if ! kill -0 $PID 2>/dev/null || grep -q ' serving ' "$LOG"; then break; fi
    sleep 0.1
  done
  kill -0 $PID 2>/dev/null || die "nvmfd has ended"
  grep -q ' serving ' "$LOG" || die "nvmfd does not get ready"
}
