# shellcheck shell=bash
# What the scripts in the guest share, which source it. They run as root, under systemd; every line that begins with PACKAGE is shown
# outside. ${units[@]}: the units whose state and log are shown after a failure.
set -uo pipefail
export LC_ALL=C
umask 022
cd /run/payload || exit 1
units=(nvmfd.service)

say() { echo "PACKAGE $*"; }
die() {
  local unit
  say "FAILED $*"
  for unit in "${units[@]}"; do
    SYSTEMD_COLORS=0 systemctl status --no-pager -l -n 0 "$unit"
    journalctl --no-pager -u "$unit" | tail -n 40
  done
  exit 1
}
check() { # check SENTENCE COMMAND..
  local sentence=$1
  shift
  if "$@" >/tmp/out 2>&1; then
    say "ok     $sentence"
  else
    cat /tmp/out
    die "$sentence"
  fi
}
soon() { # soon COMMAND..: until it is true, some minutes at most: an emulated guest is slow
  for _ in $(seq 600); do
    if "$@" >/dev/null 2>&1; then return 0; fi
    sleep 0.25
  done
  return 1
}

# ---- for tests that restart the guest (NVMFD_REBOOTS=yes, see boot) -----------------------------------------------------

stage() { cat /var/lib/package-stage 2>/dev/null || echo 1; }
restart_at() { # STAGE: `inside` runs again after an orderly restart of the guest, with this stage
  local dropin=/run/systemd/system/package-test.service.d
  echo "$1" >/var/lib/package-stage
  mkdir -p $dropin
  printf '[Service]\nExecStopPost=\n' >$dropin/restart.conf
  systemctl daemon-reload
  say "== restart"
  systemctl reboot
  sleep infinity
}

# ---- a target that is there at each boot -------------------------------------------------------------------------------

KEY=/etc/nvmfd/host.key
# Installs the package, and has it serve a disk to this host, which must authenticate, in a network namespace. As a target is another
# machine, this one starts before the units, and ends after them.
target() { # UNITS ADDRESS..: where the host has 9 in the network of each, at eth0 in the first network, eth1 in the next
  local address network='' interface count=0 listeners='' unit=/etc/systemd/system/target-network.service
  check "installs" dpkg -i first.deb
  {
    echo 'ip netns add target'
    for address in "${@:2}"; do
      if [ "$network" != "${address%.*}" ]; then
        network=${address%.*} interface=eth$count count=$((count + 1))
        echo "ip link add $interface type veth peer name $interface netns target"
        echo "ip address add $network.9/24 dev $interface"
        echo "ip link set $interface up"
        echo "ip -n target link set $interface up"
      fi
      listeners+="{ address = \"$address\" }, "
      echo "ip -n target address add $address/24 dev $interface"
    done
  } >/usr/local/sbin/target-network
  cat >$unit <<'END'
[Unit]
DefaultDependencies=no
Before=network-pre.target
Wants=network-pre.target
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -e /usr/local/sbin/target-network
[Install]
WantedBy=multi-user.target
END
  mkdir -p /etc/systemd/system/nvmfd.service.d /var/log/journal
  printf '[Unit]\nAfter=target-network.service\nRequires=target-network.service\nBefore=%s\n[Service]\nNetworkNamespacePath=%s\n' \
    "$1" /run/netns/target >/etc/systemd/system/nvmfd.service.d/target.conf
  nvme gen-dhchap-key >$KEY || die "a key"
  chown nvmfd $KEY
  chmod 600 $KEY
  cat >/etc/nvmfd/nvmfd.toml <<END
provider = "soft"
listener = [$listeners]
[[host]]
nqn = "$(cat /etc/nvme/hostnqn)"
dhchap_key_file = "$KEY"
[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:disk1"
hosts = ["$(cat /etc/nvme/hostnqn)"]
namespace = [{ nsid = 1, path = "/var/lib/nvmfd/disk1.img", size = "64MiB" }]
END
  systemctl restart systemd-journald
  systemctl daemon-reload
  check "the target starts" systemctl enable --now target-network.service nvmfd.service
  head -c 16777216 /dev/urandom >/var/tmp/data
}
stopped_before() { # UNIT UNIT: when the guest was restarted, the first had stopped before the second was to
  local log first second
  log=$(journalctl -b -1 -o cat _PID=1)
  first=$(grep -nE "^(Stopped|Unmounted) $1 " <<<"$log" | tail -n 1)
  second=$(grep -n "^Stopping $2 " <<<"$log" | tail -n 1)
  echo "$first, $second"
  test "${first%%:*}" -lt "${second%%:*}"
}
mounted() { # DIRECTORY: at this boot, with its file, and it was unmounted before
  check "after the restart it is mounted" soon findmnt "$1"
  check "has its file" cmp "$1/data" /var/tmp/data
  check "was unmounted before" bash -c "! dmesg | grep -F '($(basename "$(findmnt -no SOURCE "$1")")): recovery complete'"
  check "no unit has failed" bash -c "! systemctl --failed --no-legend --plain | grep ."
}

# ---- documents of the package -----------------------------------------------------------------------------------------

block() { # DOCUMENT HEADING NUMBER: that block of the section
  local line fence='' inside='' seen=0
  while IFS= read -r line; do
    case $line in
      '```'*)
        if [ -z "$fence" ]; then fence=1 seen=$((seen + 1)); else fence=''; fi
        continue
        ;;
      '#'*)
        if [ -z "$fence" ]; then
          inside='' seen=0
          if [ "${line##*'# '}" = "$2" ]; then inside=1; fi
        fi
        ;;
    esac
    if [ "$fence$inside$seen" = "11$3" ]; then printf '%s\n' "$line"; fi
  done <"/usr/share/doc/nvmfd/docs/src/$1.md"
}
# Writes the files of such a block: what `# cat FILE` prints. /etc/fstab gets more lines.
files() { # DOCUMENT HEADING NUMBER
  local line file='' count=0
  while IFS= read -r line; do
    case $line in
      '# cat /'*)
        file=${line#'# cat '} count=$((count + 1))
        mkdir -p "${file%/*}"
        [ "$file" = /etc/fstab ] || : >"$file"
        ;;
      '# '*) file='' ;;
      *) [ -z "$file" ] || printf '%s\n' "$line" >>"$file" ;;
    esac
  done < <(block "$@")
  [ $count -gt 0 ] || die "$1.md, $2: there is no file in block $3"
}
