# shellcheck shell=bash
# checks.sh - for tests that print a line for each check, which source it. $dir: their directory, with the logs whose ends are
# printed after a failure; $failed: their exit status.
export LC_ALL=C
umask 022
failed=0

check() { # WHAT COMMAND...; a line `took: TIME` of what it prints stands in that of the check
  # shellcheck disable=SC2154  # those who read this have set it
  if "${@:2}" >"$dir/said" 2>&1; then
    echo "ok   $1$(sed -n 's/^took: /: /p' "$dir/said")"
  else
    tail -n 20 "$dir/said" "$dir"/*log* >&2 || true
    echo "FAIL $1"
    # shellcheck disable=SC2034  # for those who read this
    failed=1
  fi
}
soon() { # COMMAND...: it succeeds within $SOON seconds, half a minute if that is not set
  local end=$((SECONDS + ${SOON:-30}))
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || return 1
    sleep 0.1
  done
}
