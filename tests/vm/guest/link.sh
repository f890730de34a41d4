# shellcheck shell=bash
# The links between a host and its target, and what can be done to them. Part of lib.sh.

# setup_link KIND
#   rxe       one Soft-RoCE device; the host connects to the guest's own address (the device loops packets back)
#   siw       one Soft-iWARP device, the same (uml only)
#   veth-rxe  two Soft-RoCE devices, one on each end of a veth pair: real frames on the wire, for capture and for loss
#   soft      a Soft-RoCE device for the host; the target's end of the veth pair is in a network namespace of its own, where
#             there is no RDMA device: for nvmfd's own transport (rxe knows the first namespace only)
#   tap       a Soft-RoCE device on the guest's network card; the target runs on the machine itself, beside the guest
#             (beside.sh), on nvmfd's own transport. The MTU is the one that the guest was started with
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
      ip addr add 10.77.0.1/24 dev d0
      ip -6 addr add fd77:0:0:1::1/64 dev d0 nodad
      rdma link add "${kind}0" type "$kind" netdev d0 || return 1
      ;;
    veth-rxe | soft)
      # rxe knows the first network namespace only, so both ends of veth-rxe live there, and policy routing, which puts the
      # table of local addresses last, keeps the traffic between two addresses of one machine on the wire
      ip link add v0 address 52:54:00:00:77:02 type veth peer name v1 address 52:54:00:00:77:01 || return 1
      ip link set v0 mtu "$mtu" up
      ip addr add 10.77.0.2/24 dev v0
      if [ "$kind" = soft ]; then
        ip netns add target
        ip link set v1 netns target
        ip -n target link set lo up
        ip -n target link set v1 mtu "$mtu" up
        ip -n target addr add 10.77.0.1/24 dev v1
        ip -n target -6 addr add fd77:0:0:1::1/64 dev v1 nodad
        ip -6 addr add fd77:0:0:1::2/64 dev v0 nodad
        for d in 10.77.0. fd77:0:0:1::; do
          ip -n target neigh replace ${d}2 lladdr 52:54:00:00:77:02 dev v1
          ip neigh replace ${d}1 lladdr 52:54:00:00:77:01 dev v0
        done
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
    tap)
      if [ ! -d /sys/class/net/eth0 ]; then
        say "this guest has no network to the machine: start it with NVMFD_VM_NET=tap"
        return 1
      fi
      rdma link add rxe0 type rxe netdev eth0 || return 1
      ;;
    *) return 1 ;;
  esac
  sleep 0.3
  echo "$kind-$mtu" >/run/link
}

link_names() { # the addresses and the target's provider on a link; ADDR_FAMILY=6 for IPv6
  TNETNS=''
  PROVIDER=verbs
  WIRE=''
  ADRFAM=ipv4 TADDR=10.77.0.1 HADDR=10.77.0.2
  if [ "${ADDR_FAMILY:-4}" = 6 ]; then ADRFAM=ipv6 TADDR=fd77:0:0:1::1 HADDR=fd77:0:0:1::2; fi
  case $1 in
    veth-rxe) WIRE=v0 ;;
    soft) TNETNS=target PROVIDER=soft WIRE=v0 ;;
    tap)
      PROVIDER=soft WIRE=eth0 TADDR=192.168.77.1 HADDR=192.168.77.$((10 + VM_ID))
      if [ $ADRFAM = ipv6 ]; then TADDR=fd77::1 HADDR=fd77::$((10 + VM_ID)); fi
      ;;
  esac
}

teardown_link() {
  local l
  impair
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

# what a bad wire does, one thing at a time and all together. `reorder 1%`: these overtake all that is delayed. (`reorder 99%` would not
# just be late for the others: netem puts what is not delayed at the head of its queue, which turns a burst round.)
IMPAIRMENTS=('loss 1%' 'delay 1ms reorder 1%' 'duplicate 1%' 'delay 1ms reorder 1% loss 1% duplicate 1%')
if [ -n "${LONG:-}" ]; then IMPAIRMENTS+=('delay 1ms reorder 10%' 'loss 5%' 'duplicate 20%' 'delay 20ms 5ms'); fi

# impair NETEM...: what `tc netem` is to do to every frame on the wire of this link, in both directions; nothing: no more of it.
# Only the guest's side is touched: frames that arrive pass a device of their own (ifb) first.
impair() {
  local d
  for d in eth0 v0; do tc qdisc del dev $d root; tc qdisc del dev $d ingress; done 2>/dev/null
  ip link del in0 2>/dev/null
  if [ $# = 0 ]; then return 0; fi
  if [ -z "$WIRE" ]; then say "the link $LINK has no wire that could be impaired"; return 1; fi
  modprobe -aq ifb sch_netem sch_ingress cls_matchall act_mirred 2>/dev/null
  ip link add in0 type ifb && ip link set in0 mtu "$(<"/sys/class/net/$WIRE/mtu")" up &&
    tc qdisc add dev in0 root netem limit 50000 "$@" && tc qdisc add dev "$WIRE" root netem limit 50000 "$@" &&
    tc qdisc add dev "$WIRE" ingress && tc filter add dev "$WIRE" parent ffff: protocol all matchall action mirred egress redirect dev in0
}

wire_mtu() { # BYTES: of the guest's end of the link tap; the path MTU of a connection follows
  ip link set eth0 mtu "$1" || return 1
  if [ "$1" -ge 1280 ]; then # below, IPv6 takes its addresses away
    ip -6 addr replace "fd77::$((10 + VM_ID))/64" dev eth0 nodad
    ip neigh replace fd77::1 lladdr "$(ip neigh show 192.168.77.1 dev eth0 | awk '{print $3}')" dev eth0
  fi
  sleep 0.2
}

# what the wire did so far: frames sent to the target and lost on the way, and the same for those that came
impaired() {
  local d
  for d in "$WIRE" in0; do
    tc -s qdisc show dev "$d" | awk -v d="$d" '/netem/ {n = 1} n && /Sent/ {print (d == "in0" ? "received" : "sent"), $4, "frames, dropped", $7; exit}' | tr -d ,
  done | tr '\n' ' '
}

# what the host's device counted since it was made: only what says that something was sent again or did not fit
rxe_counters() {
  local f
  for f in /sys/class/infiniband/*/ports/1/hw_counters/{duplicate_request,out_of_seq_request,rcvd_rnr_err,rcvd_seq_err,retry_exceeded_err,completer_retry_err}; do
    printf '%s %s  ' "${f##*/}" "$(<"$f")"
  done
}
