# shellcheck shell=bash
# What scripts that need a fresh Debian share, which source it. A root is made once, and kept in $cache.
export LC_ALL=C
umask 022
# shellcheck disable=SC2034  # for those who read this
cache=${NVMFD_VM_CACHE:-/var/cache/nvmfd-vm}

# DIRECTORY/tree is a root of RELEASE with PACKAGE,.. in which COMMANDS have run.
fresh() { # DIRECTORY RELEASE PACKAGE,.. [COMMANDS]
  if [ -e "$1/tree" ]; then return; fi
  echo "making a fresh $2 in $1" >&2
  rm -rf "$1.new"
  mkdir -p "$1.new"
  debootstrap --variant=minbase ${3:+"--include=$3"} "$2" "$1.new/tree" >"$1.new/log"
  if [ -n "${4:-}" ]; then
    chroot "$1.new/tree" env DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin \
      sh -ec "$4" >>"$1.new/log" 2>&1
  fi
  mv -T "$1.new" "$1"
}
