# shellcheck shell=bash
# Programs that run on the machine itself, beside the guest: on the link `tap` the target does, or its host. Part of lib.sh.
#
# They run in the network namespace at the other end of the guest's network card, as a user without any privilege. A request is a
# file in /vm/beside, NAME.ask, with shell text; the machine's side (tests/vm/beside) answers with NAME.pid, NAME.out and, at the
# end, NAME.status. Everything that was started so ends with the guest.

beside_guest() { [ "$LINK" = tap ]; }

if beside_guest; then
  BACK=/vm/back
  CONFIG=/vm/nvmfd.toml
  MACHINE_DIR=$(cat /vm/directory 2>/dev/null)
fi

beside_start() { # SHELL-TEXT: begins; its name is in $JOB, its process number there in $JOB_PID
  JOB=/vm/beside/$FLOW.$$.$((BESIDE += 1)).$RANDOM
  printf '%s\n' "$1" >"$JOB.new" && mv "$JOB.new" "$JOB.ask" || return 1
  if ! wait_for 20 test -s "$JOB.pid"; then
    say "nobody beside the guest runs programs for it: start it with NVMFD_VM_NET=tap"
    return 1
  fi
  JOB_PID=$(<"$JOB.pid")
}

beside_end() { # JOB [SECONDS]: waits for it, prints its output; its status
  wait_for "${2:-60}" test -s "$1.status" || return 124
  cat "$1.out"
  return "$(<"$1.status")"
}

beside() { # SHELL-TEXT: runs it to its end, at most LIMIT seconds; prints its output; its status
  local JOB JOB_PID
  beside_start "$1" || return 1
  if ! wait_for "${LIMIT:-60}" test -s "$JOB.status"; then
    beside_stop "$JOB"
    return 124
  fi
  local rc=0
  beside_end "$JOB" || rc=$?
  rm -f "$JOB".*
  return $rc
}
BESIDE=0

beside_stop() { # JOB: with everything that it started
  local JOB JOB_PID
  if [ ! -e "$1.status" ]; then
    beside_start "kill -9 -- -$(<"$1.pid")" && wait_for 10 test -s "$1.status"
  fi
}

beside_clear() { # nothing that this flow has started goes on
  local job
  for job in "/vm/beside/$FLOW.$$".*.pid; do beside_stop "${job%.pid}"; done
}

lend() { # PROGRAM...: a copy for the machine's side, in $MACHINE_DIR/bin, where any user may run it
  mkdir -p /vm/bin && cp -pu "$@" /vm/bin/ && chmod 755 /vm/bin/*
}
