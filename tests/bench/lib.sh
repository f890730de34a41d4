# shellcheck shell=bash
# lib.sh - for `run` and `attach`, which source it: rounds, and the table of their medians.
#
# Of them: NAME, DIR, NVMFD and ROUNDS. After start_target, PID is the daemon.
export LC_ALL=C
umask 022
RESULTS=$DIR/results PID=''

die() {
  printf '%s: %s\n' "$NAME" "$*" >&2
  if [ -s "$DIR/log" ]; then tail -n 5 "$DIR/log" >&2; fi
  exit 1
}
need() { # TOOL...
  local tool
  for tool in "$@"; do
    command -v "$tool" >/dev/null || die "there is no $tool: apt-get install jq fio util-linux nbdkit"
  done
  [ "$(nproc)" -ge 2 ] || die "this needs two CPUs"
}

start_target() { # with $DIR/nvmfd.toml
  "$NVMFD" --config "$DIR/nvmfd.toml" >"$DIR/log" 2>&1 &
  PID=$!
  await $PID "$DIR/log" serving
}
await() { # PROCESS FILE TEXT: until the file has it
  local _
  for _ in $(seq 100); do
    if grep -qs -- "$3" "$2" || ! kill -0 "$1" 2>/dev/null; then break; fi
    sleep 0.1
  done
  grep -q -- "$3" "$2" || die "no \"$3\" within 10 s: $(tail -n 3 "$2")"
}

number() { # JQ-EXPRESSION of a side of fio's JSON in $DIR/json
  jq -r "[.jobs[0].read, .jobs[0].write] | max_by(.total_ios) | $1" "$DIR/json"
}
note() { # CASE VALUE UNIT LIMIT
  printf '%s\t%s\t%s\t%s\n' "$@" >>"$DIR/round"
}

stolen() { # time that the hypervisor took from all CPUs, in ticks
  local ticks
  read -ra ticks </proc/stat
  echo "${ticks[8]}"
}
rounds() { # FUNCTION: calls it ROUNDS times; a round that lost more than 1 % of a CPU to the hypervisor is repeated
  local good=0 all=0 before begun hertz
  hertz=$(getconf CLK_TCK)
  while [ $good -lt "$ROUNDS" ]; do
    [ $((all += 1)) -le $((4 * ROUNDS)) ] || die "the hypervisor takes CPU time in most rounds"
    printf 'round %s of %s\r' $((good + 1)) "$ROUNDS" >&2
    : >"$DIR/round"
    before=$(stolen) begun=$SECONDS
    "$1"
    if [ $((($(stolen) - before) * 100)) -le $(((SECONDS - begun) * hertz)) ]; then
      cat "$DIR/round" >>"$RESULTS"
      good=$((good + 1))
    fi
  done
  [ "$all" = "$good" ] || printf '%s rounds are repeated, in which the hypervisor took CPU time\n' $((all - good))
}

table() { # WHO WHOSE-LIMIT: a row for each case
  printf '\n%-34s %12s %-5s %12s  %s\n' case "$1" '' "$2" "$1 / $2 (median of rounds; least, most)"
  awk -F'\t' '
  !($1 in seen) { seen[$1] = 1; order[++cases] = $1 }
  { n[$1]++; value[$1, n[$1]] = $2 + 0; unit[$1] = $3; best[$1, n[$1]] = $4 + 0; ratio[$1, n[$1]] = $2 / $4 }
  function median(a, c,   i, j, t, s) {
    for (i = 1; i <= n[c]; i++) s[i] = a[c, i]
    for (i = 1; i <= n[c]; i++) for (j = i + 1; j <= n[c]; j++) if (s[j] < s[i]) { t = s[i]; s[i] = s[j]; s[j] = t }
    least = s[1]; most = s[n[c]]
    return s[int((n[c] + 1) / 2)]
  }
  function show(x) { return x >= 1000 ? sprintf("%.0f", x) : sprintf("%.2f", x) }
  END {
    for (i = 1; i <= cases; i++) {
      c = order[i]; v = median(value, c); b = median(best, c); r = median(ratio, c)
      printf "%-34s %12s %-5s %12s  %.2f (%.2f, %.2f)\n", c, show(v), unit[c], show(b), r, least, most
    }
  }' "$RESULTS"
}
