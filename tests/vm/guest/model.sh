# shellcheck shell=bash
# shellcheck disable=SC2034  # for scripts that source this
# A model of what a daemon serves: edits of it at random, its configuration as a file, and what the daemon and the host say instead.
# After lib.sh.

NVMFCTL=${NVMFCTL:-${NVMFD%/*}/nvmfctl}
DIR=/run/changes # of the configuration, the state and the socket: the daemon's user may write there
POOL=({1..5})       # hosts that come and go are known by number
declare -A SUBSYSTEM # NAME: its hosts, by number; 0 is ours
declare -A SPACE     # "NAME NSID": kind, MiB, block size, number of its file
declare -A PORTAL    # ID: port and state
declare -A GONE      # the namespaces that the present edits have removed or resized
LATER=''             # the present edits are made, and what they ask for is done later
FILES=0
HOST_NAMES=()

managed_directory() { # where everything is; sets STATE and SOCKET
  if beside_guest; then DIR=/vm/changes; fi
  rm -rf $DIR
  mkdir -p $DIR/state "$BACK/changes"
  chmod 777 $DIR $DIR/state "$BACK/changes"
  CONFIG=$DIR/nvmfd.toml
  STATE=$(target_path $DIR/state)
  SOCKET=$(target_path $DIR/socket)
  if beside_guest; then
    lend "$NVMFCTL"
    NVMFCTL=$MACHINE_DIR/bin/nvmfctl
  fi
  CTL="$NVMFCTL --socket $SOCKET"
}

ctl() { at_target "$NVMFCTL" --socket "$SOCKET" "$@"; }

write_config() { # the file is there before the start, and a start after a kill leaves it as it is
  [ -e "$CONFIG" ] || render >"$CONFIG"
  # `save` keeps the owner of the file, which an ordinary user cannot
  if beside_guest; then chown $((61000 + VM_ID)):$((61000 + VM_ID)) "$CONFIG"; fi
}

model_begin() { # what stays: the namespaces of add_file, our host, the first listener
  local n nsid kind path mib bs
  SUBSYSTEM=([$NQN]=0) PORTAL=([1]="$PORT optimized")
  for n in "${NAMESPACES[@]}"; do
    IFS='|' read -r nsid kind path mib bs <<<"$n"
    SPACE["$NQN $nsid"]="kept $mib $bs"
  done
  for n in 0 "${POOL[@]}"; do HOST_NAMES[n]=$(host_name "$n"); done
  TARGET_BACK=$(target_path "$BACK")
  rm -f "$CONFIG"
}

host_name() { if [ "$1" = 0 ]; then echo "$HOSTNQN"; else echo "nqn.2026-11.io.nvmfd:host$1"; fi; }
path_of() { # "NAME NSID"
  case ${SPACE[$1]} in
    kept*) echo "$BACK/ns${1#* }" ;;
    *) echo "$BACK/changes/${SPACE[$1]##* }" ;;
  esac
}

# What follows runs often, on a CPU where a process costs more than all of it: so it makes none. The order is that of the names.
NAMES=("$NQN" "$NQN-0" "$NQN-1" "$NQN-2")
NSIDS=({1..8})
PORTALS=({1..4})

model() { # one line for everything that is served, in $MODEL
  local name nsid kind mib bs id port state h hosts
  MODEL=''
  for name in "${NAMES[@]}"; do
    if [ -z "${SUBSYSTEM[$name]+there}" ]; then continue; fi
    hosts=''
    for h in 0 "${POOL[@]}"; do
      if [[ " ${SUBSYSTEM[$name]} " = *" $h "* ]]; then hosts+=${hosts:+,}${HOST_NAMES[h]}; fi
    done
    MODEL+="subsystem $name $hosts"$'\n'
    for nsid in "${NSIDS[@]}"; do
      if [ -z "${SPACE[$name $nsid]:-}" ]; then continue; fi
      read -r kind mib bs _ <<<"${SPACE[$name $nsid]}"
      MODEL+="namespace $name $nsid $mib $bs"$'\n'
    done
  done
  for id in "${PORTALS[@]}"; do
    if [ -z "${PORTAL[$id]:-}" ]; then continue; fi
    read -r port state <<<"${PORTAL[$id]}"
    MODEL+="listener $id $port $state"$'\n'
  done
  MODEL=${MODEL%$'\n'}
}

observe() { # the same of what the daemon serves, in $SEEN
  SEEN=$(at_target sh -c "$CTL --json subsystem list; $CTL --json listener list" | jq -rs '(.[0] | sort_by(.nqn)[] | "subsystem \(.nqn) \(.hosts | sort | join(","))",
      (.namespaces | sort_by(.nsid)[] | "namespace \(.subsystem) \(.nsid) \(.size_bytes / 1048576) \(.block_size_bytes)")),
    (.[1] | sort_by(.id)[] | "listener \(.id) \(.address | split(":") | last) \([.ana[]] | unique | if . == [] then "optimized" else join(",") end)")')
}

render() { # the model as a configuration
  local name nsid kind mib bs number id port state h text
  text="provider = \"$PROVIDER\"
state_directory = \"$STATE\"
missing = \"fail\"
[management]
socket = \"$SOCKET\"
"
  for id in "${PORTALS[@]}"; do
    if [ -z "${PORTAL[$id]:-}" ]; then continue; fi
    read -r port state <<<"${PORTAL[$id]}"
    text+="[[listener]]
id = $id
address = \"$TADDR\"
port = $port
ana = \"$state\"
"
  done
  for name in "${NAMES[@]}"; do
    if [ -z "${SUBSYSTEM[$name]+there}" ]; then continue; fi
    text+="[[subsystem]]
nqn = \"$name\"
hosts = ["
    for h in ${SUBSYSTEM[$name]}; do text+="\"${HOST_NAMES[h]}\", "; done
    text+="]
"
    for nsid in "${NSIDS[@]}"; do
      if [ -z "${SPACE[$name $nsid]:-}" ]; then continue; fi
      read -r kind mib bs number <<<"${SPACE[$name $nsid]}"
      text+="[[subsystem.namespace]]
nsid = $nsid
block_size = $bs
size = \"${mib}MiB\"
"
      case $kind in
        ram | null) text+="kind = \"$kind\"" ;;
        kept) text+="path = \"$TARGET_BACK/ns$nsid\"" ;;
        *) text+="path = \"$TARGET_BACK/changes/$number\"" ;;
      esac
      text+=$'\n'
    done
  done
  printf '%s\n' "$text${EXTRA_CONFIG:-}"
}

model_of_host() { # the namespaces that our host has
  local nsid mib
  for nsid in "${NSIDS[@]}"; do
    if [ -z "${SPACE[$NQN $nsid]:-}" ]; then continue; fi
    read -r _ mib _ <<<"${SPACE[$NQN $nsid]}"
    echo "$nsid $mib"
  done
}
host_namespaces() {
  local b
  for b in /sys/block/nvme*; do
    if [[ ${b##*/} =~ ^nvme[0-9]+n[0-9]+$ ]] && [ "$(<"$b/device/subsysnqn")" = "$NQN" ]; then
      echo "$(<"$b/nsid") $(($(<"$b/size") / 2048))"
    fi
  done 2>/dev/null | sort -n
}
host_agrees() { [ "$(host_namespaces)" = "$(model_of_host)" ]; }
model_of_discovery() { # what our host is told: what it may use, at each listener
  local name id
  for name in "${!SUBSYSTEM[@]}"; do
    if [[ " ${SUBSYSTEM[$name]} " != *' 0 '* ]]; then continue; fi
    for id in "${!PORTAL[@]}"; do echo "$name ${PORTAL[$id]% *}"; done
  done | sort
}

any() { # WORD...: one of them, in $ANY; fails where there is none
  if [ $# = 0 ]; then return 1; fi
  shift $((RANDOM % $#))
  ANY=$1
}
changing() { # the namespaces that may change, in ${KEYS[@]}
  local key
  KEYS=()
  for key in "${!SPACE[@]}"; do
    if [[ ${SPACE[$key]} != kept* ]]; then KEYS+=("$key"); fi
  done
}

# Makes this many edits of the model; $COMMAND is the nvmfctl command of the last one. Of one namespace only: another disk
# under the number of one that is in use takes two steps.
mutate() {
  local n
  GONE=()
  for ((n = 0; n < ${1:-1}; n++)); do
    until try_mutation; do :; done
  done
}
try_mutation() {
  local name key kind mib bs id h
  case $((RANDOM % 16)) in
    [0-3]) # a namespace comes
      any "${!SUBSYSTEM[@]}" && name=$ANY
      key="$name $((3 + RANDOM % 6))"
      if [ -n "${SPACE[$key]:-}${GONE[$key]:-}" ]; then return 1; fi
      any file file ram null && kind=$ANY
      any 512 4096 && bs=$ANY
      mib=$((4 + RANDOM % 12))
      SPACE[$key]="$kind $mib $bs $((FILES += 1))"
      COMMAND=(namespace add "$name" "${key#* }")
      case $kind in
        file)
          COMMAND+=("$(target_path "$(path_of "$key")")")
          ;;
        *) COMMAND+=(--kind "$kind") ;;
      esac
      COMMAND+=(--size "${mib}MiB" --block-size "$bs")
      ;;
    [45]) # one goes
      changing
      any "${KEYS[@]}" || return 1
      GONE[$ANY]=1
      unset "SPACE[$ANY]"
      COMMAND=(namespace remove "${ANY% *}" "${ANY#* }")
      ;;
    [6-8]) # one has another size
      changing
      any "${KEYS[@]}" || return 1
      key=$ANY
      local number old
      read -r kind old bs number <<<"${SPACE[$key]}"
      mib=$((4 + RANDOM % 12))
      if [ -n "${GONE[$key]:-}" ]; then return 1; fi
      if [ "$kind" = file ]; then
        # a namespace grows to what its file has by then; what has not been made yet, or is changed later, has no size to grow to
        if [ ! -e "$(path_of "$key")" ]; then return 1; fi
        if [ $mib -gt "$old" ]; then
          if [ -n "$LATER" ]; then return 1; fi
          truncate -s "${mib}M" "$(path_of "$key")"
        fi
      fi
      GONE[$key]=1
      SPACE[$key]="$kind $mib $bs $number"
      COMMAND=(namespace resize "${key% *}" "${key#* }" "${mib}MiB")
      ;;
    9 | 10) # a host may, or may no longer
      any "${!SUBSYSTEM[@]}" && name=$ANY
      any "${POOL[@]}" && h=$ANY
      if [[ " ${SUBSYSTEM[$name]} " = *" $h "* ]]; then
        SUBSYSTEM[$name]=$(tr ' ' '\n' <<<"${SUBSYSTEM[$name]}" | grep -vx "$h" | paste -sd' ')
        COMMAND=(host deny "$name" "$(host_name "$h")")
      else
        SUBSYSTEM[$name]+="${SUBSYSTEM[$name]:+ }$h"
        COMMAND=(host allow "$name" "$(host_name "$h")")
      fi
      ;;
    11 | 12) # a listener comes, or goes
      id=$((2 + RANDOM % 3))
      if [ -n "${PORTAL[$id]:-}" ]; then
        unset "PORTAL[$id]"
        COMMAND=(listener remove "$id")
      else
        PORTAL[$id]="$((PORT + id)) optimized"
        COMMAND=(listener add "$TADDR" --port $((PORT + id)) --id "$id")
      fi
      ;;
    13) # another state of a path that nobody uses
      id=$((2 + RANDOM % 3))
      if [ -z "${PORTAL[$id]:-}" ]; then return 1; fi
      any optimized non-optimized inaccessible persistent-loss change
      PORTAL[$id]="${PORTAL[$id]% *} $ANY"
      COMMAND=(ana set "$id" "$ANY")
      ;;
    *) # a subsystem comes, or goes with all that it has
      name=$NQN-$((RANDOM % 3))
      if [ -z "${SUBSYSTEM[$name]+there}" ]; then
        any 0 1 '' && h=$ANY
        SUBSYSTEM[$name]=$h
        COMMAND=(subsystem add "$name")
        if [ -n "$h" ]; then COMMAND+=(--host "$(host_name "$h")"); fi
      else
        unset "SUBSYSTEM[$name]"
        for key in "${!SPACE[@]}"; do
          if [ "${key% *}" = "$name" ]; then
            GONE[$key]=1
            unset "SPACE[$key]"
          fi
        done
        COMMAND=(subsystem remove "$name")
      fi
      ;;
  esac
}

# mistake NUMBER: something that is to be refused: by $COMMAND, or by a file with $BROKEN in it; in words that match $WORDS
mistake() {
  local good
  BROKEN='' good=''
  if [ "$1" -ge 8 ]; then good=$(render); fi
  case $1 in
    0) COMMAND=(namespace add "$NQN" 1 --kind ram --size 4MiB) WORDS='namespace 1 exists already' ;;
    1) COMMAND=(namespace remove "$NQN" 999) WORDS='there is no namespace 999' ;;
    2) COMMAND=(namespace add "$NQN" 900 "$(target_path "$BACK/nothing-there")") WORDS='nothing-there' ;;
    3) COMMAND=(namespace add "$NQN" 900 --kind ram --size 4MiB --set nosuchkey=1) WORDS='nosuchkey' ;;
    4) COMMAND=(namespace resize "$NQN" 1 4000MiB) WORDS='ns1|shorter|smaller|larger' ;;
    5) COMMAND=(listener add 203.0.113.7) WORDS='203\.0\.113\.7' ;;
    6) COMMAND=(subsystem add "$NQN" --any-host) WORDS='subsystem .* exists already' ;;
    7) COMMAND=(host deny "$NQN" "$(host_name 77)") WORDS='is no host of|admits any host' ;;
    8) BROKEN=$good$'\nthis is not = [ toml' WORDS="toml:$(($(wc -l <<<"$good") + 1)):" ;;
    9)
      BROKEN=$(sed '0,/^\[\[subsystem\.namespace\]\]/s//[[subsystem.namespace]]\nnsid = 77\nkind = "null"\nsize = "4MiB"\n[[subsystem.namespace]]\nnsid = 77\nkind = "null"\nsize = "4MiB"\n&/' <<<"$good")
      WORDS='[0-9]+(:|, column )[0-9]+: this nsid is used twice'
      ;;
    10)
      BROKEN=$(sed "0,/^\[\[subsystem\.namespace\]\]/s|^\[\[subsystem\.namespace\]\]|&\nnsid = 78\npath = \"$(target_path "$BACK/nothing-there")\"\n&|" <<<"$good")
      WORDS='nothing-there'
      ;;
    11) BROKEN=$(sed '/^missing = /a nosuchkey = 1' <<<"$good") WORDS='nosuchkey' ;;
  esac
}
