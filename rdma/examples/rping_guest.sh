#!/bin/bash
# Runs rping_server against rping (rdmacm-utils) on a machine whose interface carries a software
# RDMA device. Needs root and a kernel with rdma_rxe or siw; meant for a virtual machine, because
# it replaces RDMA devices.
#   rping_guest.sh rxe|siw SERVER [INTERFACE]
set -u
export LC_ALL=C
umask 022
kind=$1 server=$2 if=${3:-eth0} failed=0
ulimit -l unlimited
for old in $(rdma link | sed -n 's/^link \(.*\)\/.*/\1/p'); do rdma link del "$old"; done
rdma link add "test_$kind" type "$kind" netdev "$if" || exit 1
ip -6 addr add fd00:77::99/64 dev "$if" nodad 2>/dev/null
v4=$(ip -4 -o addr show dev "$if" | sed 's/.*inet \([0-9.]*\).*/\1/' | head -1) v6=fd00:77::99
sleep 0.5

say() { echo "--- $kind: $*"; }
bad() { echo "FAILED ($kind): $*"; failed=1; }
serve() { timeout 120 "$server" "$@" & pid=$!; sleep 0.4; }
served() { wait "$pid" || bad "the server ended with $?"; }
ping_() { timeout 20 rping -c -V "$@" >/dev/null 2>&1; }
# Queue pairs, ids, regions and contexts; rxe keeps one queue pair, queue and domain of its own.
objects() { sleep 0.3; rdma resource show | sed 's/.*: //' | tr -d '\n'; }
before=$(objects)
clean() { local now; now=$(objects); [ "$now" = "$before" ] || bad "objects left: $now, were $before"; }

for pair in "$v4 $v4" "[$v6] $v6" "0.0.0.0 $v4" "[::] $v6"; do
  # shellcheck disable=SC2086  # two words
  set -- $pair
  say "100 rounds from $2 to $1"
  serve "$1:7174" 1; ping_ -a "$2" -C 100 || bad "rping to $1"; served; clean
done
say "200 clients, accepted on one fabric and served on another"
serve "$v4:7174" 200 elsewhere
for i in $(seq 200); do
  ping_ -a "$v4" -C 5 || bad "client $i"
  case $i in 50 | 100 | 199) grep VmRSS "/proc/$(pgrep -P "$pid")/status"; esac
done
served; clean
say "8 clients at once, 65,000 bytes"
serve "$v4:7174" 8; pids=()
for i in $(seq 8); do ping_ -a "$v4" -C 50 -S 65000 & pids+=($!); done
for p in "${pids[@]}"; do wait "$p" || bad "one of 8"; done; served; clean
say "the server hangs up"
# rping sometimes sleeps for ever after a hang-up: its exit status says nothing
serve "$v4:7174" 5 hang-up; for i in $(seq 5); do timeout 2 rping -c -a "$v4" -C 1000 >/dev/null 2>&1; done; served; clean
say "rejected"
serve "$v4:7174" 3 reject
for i in $(seq 3); do rping -c -a "$v4" -C 5 2>&1 | grep -q REJECTED || bad "no reject"; done; served; clean
say "clients that are killed"
serve "$v4:7174" 6
for i in $(seq 6); do rping -c -a "$v4" -C 1000000 >/dev/null 2>&1 & sleep 0.3; kill -9 $!; wait $! 2>/dev/null; done; served; clean
say "a client that has gone before it is accepted"
serve "$v4:7174" 2 slow; timeout 0.3 rping -c -a "$v4" -C 5 >/dev/null 2>&1; ping_ -a "$v4" -C 5 || bad "the next client"; served; clean
say "more than the completion queue holds"
serve "$v4:7174" 10 deep; pids=()
for i in $(seq 10); do rping -c -a "$v4" -C 1000000 >/dev/null 2>&1 & pids+=($!); sleep 0.2; done
kill -9 "${pids[@]}" 2>/dev/null; wait "${pids[@]}" 2>/dev/null; kill "$pid" 2>/dev/null; wait "$pid" 2>/dev/null; clean
say "the fabric is dropped under its clients"
serve "$v4:7174" 1; pids=()
for i in 1 2; do rping -c -a "$v4" -C 1000000 >/dev/null 2>&1 & pids+=($!); done; sleep 0.3
ping_ -a "$v4" -C 5 || bad "the third client"; served; kill -9 "${pids[@]}" 2>/dev/null; wait "${pids[@]}" 2>/dev/null; clean
[ $failed = 0 ] && echo "all well on $kind" || exit 1
