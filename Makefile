# What one does with this repository. `make` alone lists it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
MAKEFLAGS += --no-print-directory

# Packages and guests need root; everything else does not.
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)
CARGO ?= cargo
# Paths may hold blanks: functions that split into words (abspath, wildcard) are not for them.
BUILD := $(shell realpath -m -- "$${CARGO_TARGET_DIR:-build}")
NVMFD := $(BUILD)/release/nvmfd
NVMFCTL := $(BUILD)/release/nvmfctl
NVMF := $(BUILD)/release/nvmf
GUEST := $(SUDO) env NVMFD="$(NVMFD)" STORE_TESTS="$(BUILD)/store-tests" RDMA_TESTS="$(BUILD)/rdma-tests"
# Tools print English and sort by bytes in every locale.
export LC_ALL := C

PACKAGES := gcc libc6-dev
# What tests ask besides: tshark for what is on the wire; headers that types are compared with; jq, fio and valgrind for measuring;
# scripts run under each awk; file systems with reflinks.
TEST_PACKAGES := tshark libibverbs-dev librdmacm-dev pkg-config jq fio valgrind util-linux iproute2 shellcheck gawk mawk busybox xfsprogs btrfs-progs
CEPH_PACKAGES := ceph-mon ceph-osd ceph-common python3-rados librbd1 librados2
NATIVE_PACKAGES := libnbd-bin qemu-utils fio
MDNS_PACKAGES := avahi-daemon avahi-utils dbus iproute2
CONSOLE_PACKAGES := chromium-headless-shell fonts-dejavu-core
SSH_PACKAGES := openssh-client libwrap0
# Of Debian 12. The bindgen of rdma-sys reads headers with libclang 14 or 15 alone, and only `layouts` needs it.
LIBCLANG_PACKAGES := libclang1-14 libclang-common-14-dev

# Installs those of some Debian packages that are missing.
define install
missing=(); \
	for package in $(1); do \
	  dpkg-query -W -f '$${Status}' "$$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$$package"); \
	done; \
	if [ $${#missing[@]} -gt 0 ]; then \
	  echo "installing $${missing[*]}"; \
	  if [ -n "$(SUDO)" ] && ! command -v sudo >/dev/null; then echo "make: become root, or install sudo" >&2; exit 1; fi; \
	  $(SUDO) apt-get -qq -o DPkg::Lock::Timeout=300 update; \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$${missing[@]}"; \
	fi
endef

.PHONY: help packages test-packages build programs test test-cluster bench-cluster soak-cluster format lint unit layouts doc budgets side-by-side all-test-packages native zones ssh client mdns monitoring images console-test release reproduce test-distributions test-readme test-attach test-stas compiled guests mutants some-mutants sim demo record demo-guest bench bench-attach loss scale qos mixed cost structure bench-guests hostile torture fuzz asan miri install deb rpm test-package container sbom book vm clean

help: ## This list
	@echo "make ..."
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done

packages: ## Install the Debian packages that a build needs, where they are missing
	@$(call install,$(PACKAGES))
	@command -v $(CARGO) >/dev/null || { echo "make: there is no cargo: install Rust, see https://rustup.rs" >&2; exit 1; }

test-packages: packages
	@$(call install,$(TEST_PACKAGES))
	@[ -x "$(BUILD)/prometheus" ] || { mkdir -p "$(BUILD)/deb" && cd "$(BUILD)/deb" && rm -f prometheus_*.deb && \
	  apt-get -qq -o APT::Sandbox::User=root download prometheus && \
	  dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --strip-components 3 -C .. ./usr/bin/promtool ./usr/bin/prometheus; }

# Installs nothing: `make packages` does. The programs come first, as they are released: together with the package tests, cargo would
# build them with the simulated network.
build: programs ## Build everything: build/release/nvmfd, nvmfctl, nvmf
	$(CARGO) build --release -p tests
	@echo "built $(NVMFD)"

programs: # The programs alone: a third of the work
	$(CARGO) build --release -p nvmfd -p initiator

test: all-test-packages format compiled unit side-by-side guests ## Everything that has to pass before a change is merged

# At once, because each installation takes a while by itself.
all-test-packages:
	@$(call install,$(PACKAGES) $(TEST_PACKAGES) $(CEPH_PACKAGES) curl $(NATIVE_PACKAGES) $(MDNS_PACKAGES) $(CONSOLE_PACKAGES) $(SSH_PACKAGES))

# Compilers of one profile wait for each other, those of two fill both CPUs: here everything is compiled that later steps run, and no
# test runs beside it. Where the kernel of the guests fails, `guests` says why. sudo could ask for no password beside other commands.
compiled: packages # Tests, programs and the kernel of the guests are compiled
	@$(SUDO) true
	@tests/side_by_side "$(MAKE) lint && $(CARGO) test --workspace --no-run --quiet" "$(MAKE) build" \
	  "$(SUDO) tests/vm/vm --kind uml setup || true"

# What waits more than it computes, beside what compiles. The targets of the first command use the same addresses, those of the second
# the same build directory.
side-by-side: all-test-packages build
	@$(SUDO) true
	@tests/side_by_side "$(MAKE) images native zones ssh client mdns monitoring" "$(MAKE) some-mutants layouts doc" \
	  "$(MAKE) budgets console-test"

format: # The code is formatted
	$(CARGO) fmt --all --check

lint: packages # No warning, with and without the provider verbs
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy --workspace --all-targets --no-default-features -- -D warnings
	@tree=$$($(CARGO) tree -p nvmfd -p initiator -e normal,build,features); \
	  if grep -F 'feature "testing"' <<<"$$tree"; then echo "make: a program contains the feature testing" >&2; exit 1; fi

# They wait for a third of their time.
unit: test-packages # Tests on this machine
	@export TEST_PROGRAMS="$(BUILD)"/debug NEXTEST_TEST_THREADS=$$(($$(nproc) * 3 / 2)); if $(CARGO) nextest --version >/dev/null 2>&1; then \
	  set -x; $(CARGO) nextest run --workspace --no-fail-fast; $(CARGO) test --workspace --doc --quiet; \
	  NVMFD_TEST_IO_ENGINE=threads $(CARGO) nextest run --workspace -E 'test(/^uring::tests::/) - test(/entries::|registered_file_slot/)'; \
	else \
	  set -x; $(CARGO) test --workspace --no-fail-fast; \
	  NVMFD_TEST_IO_ENGINE=threads $(CARGO) test --workspace --lib uring::tests:: -- --skip entries:: --skip registered_file_slot; \
	fi

layouts: test-packages # Types and functions of rdma-core are those of rdma-sys
	@find_libclang() { ls -d "$${LIBCLANG_PATH:-/usr/lib/llvm-14/lib}"/libclang{,-14}.so* /usr/lib/llvm-15/lib/libclang{,-15}.so* 2>/dev/null || true; }; \
	if [ -z "$$(find_libclang)" ] && apt-cache show $(LIBCLANG_PACKAGES) >/dev/null 2>&1; then $(call install,$(LIBCLANG_PACKAGES)); fi; \
	mapfile -t found < <(find_libclang); \
	if [ $${#found[@]} -gt 0 ]; then set -x; \
	  LIBCLANG_PATH="$${found[0]%/*}" $(CARGO) test -p rdma --lib --features layout-test verbs::ffi::tests::layout; \
	else echo "layouts: not compared with rdma-sys: there is no libclang 14 or 15"; fi

doc: packages # The documentation builds, every link leads somewhere
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

budgets: build test-packages # A command costs no more instructions than it may
	COST="$(BUILD)"/release/instruction_count tests/bench/budgets

zones: programs # Listeners at link-local IPv6 addresses on two links
	$(SUDO) env NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" NVMF="$(NVMF)" tests/zones/run

# The server of Debian is not installed, which would start it.
ssh: programs # nvmfctl manages a target by SSH
	@$(call install,$(SSH_PACKAGES))
	@[ -x "$(BUILD)"/sshd/usr/sbin/sshd ] || { mkdir -p "$(BUILD)/deb" && cd "$(BUILD)/deb" && rm -f openssh-server_*.deb && \
	  apt-get -qq -o APT::Sandbox::User=root download openssh-server && dpkg-deb -x openssh-server_*.deb ../sshd; }
	NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" SSHD="$(BUILD)"/sshd/usr/sbin/sshd tests/ssh/run

native: programs # Target and host on this machine, by a user without any right, and under clients of the NBD protocol
	@$(call install,$(NATIVE_PACKAGES))
	NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" NVMF="$(NVMF)" tests/demo/unprivileged | tee "$(BUILD)"/demo.txt
	tests/demo/record --compare demo "$(BUILD)"/demo.txt
	NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" NVMF="$(NVMF)" tests/demo/unprivileged attach-demo | tee "$(BUILD)"/demo-attach.txt
	tests/demo/record --compare attach "$(BUILD)"/demo-attach.txt
	NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" NVMF="$(NVMF)" tests/demo/unprivileged attach

client: programs # A client that is generated from the OpenAPI document uses the management interface
	@python3 -c 'import ensurepip' 2>/dev/null || { $(call install,python3-venv); }
	NVMFD="$(NVMFD)" tests/client/run "$(BUILD)"

mdns: programs # Avahi finds the discovery service by multicast DNS
	@$(call install,$(MDNS_PACKAGES))
	$(SUDO) env NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" NVMF="$(NVMF)" tests/mdns/run

test-stas: build ## nvme-stas of Debian 13 finds a target by multicast DNS and connects it, in a guest
	@$(call install,debootstrap)
	$(SUDO) env NVMFD="$(NVMFD)" tests/mdns/stas "$(BUILD)"

monitoring: programs test-packages # A real Prometheus scrapes the daemon, and evaluates alerts and dashboard
	NVMFD="$(NVMFD)" NVMF="$(NVMF)" PROMETHEUS="$(BUILD)"/prometheus tests/monitoring/run

# Three of the pictures are in docs/src.
console-test: build ## The console in a headless Chromium: make console-test PICTURES=DIRECTORY takes pictures too
	@$(call install,$(CONSOLE_PACKAGES))
	NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" NVMF="$(NVMF)" CONSOLE_TEST="$(BUILD)/release/console_test" \
	  PICTURES="$(PICTURES)" tests/demo/unprivileged console

# The program of the tests of a library. Those of the whole workspace, which `unit` has built: one package alone needs other features
# of others, and is built again.
tests_of = readlink -f "$$($(CARGO) test --workspace --lib --no-run 2>&1 | sed -n 's,.*Executable.*(\(.*/$(1)-[0-9a-f]*\)),\1,p')"

guests: packages build # Stock Linux hosts: User-Mode Linux 6.12 on RoCE, iWARP and our own transport, then Debian's own kernel with two reactors
	@ln -sf "$$($(call tests_of,nvmfd_blockdev))" "$(BUILD)"/store-tests
	@ln -sf "$$($(call tests_of,rdma))" "$(BUILD)"/rdma-tests
	$(GUEST) tests/vm/guests
	$(GUEST) tests/vm/vm --kind uml run env NVMFD="$(NVMFD)" "$(CURDIR)"/tests/vm/demo >"$(BUILD)"/demo-guest.txt
	tests/demo/record --compare guest "$(BUILD)"/demo-guest.txt

# The second ublk has the CPUs that User-Mode Linux lacks.
test-attach: packages build ## Exports of nvmf attach at full size, and a guest that boots Debian from one: make test-attach ROUNDS=10
	@$(call install,debootstrap e2fsprogs xfsprogs qemu-system-x86)
	@$(call install,$(NATIVE_PACKAGES))
	NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" NVMF="$(NVMF)" ROUNDS="$(or $(ROUNDS),10)" tests/demo/unprivileged attach
	$(GUEST) ROUNDS="$(or $(ROUNDS),10)" tests/vm/judge --kind uml --logs "$(BUILD)"/vm-logs/attach attach ublk
	$(GUEST) ROUNDS="$(or $(ROUNDS),10)" NVMFD_VM_RELEASE=bookworm-backports NVMFD_VM_SMP=2 tests/vm/judge --kind qemu \
	  --logs "$(BUILD)"/vm-logs/attach-smp ublk
	$(SUDO) env NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" NVMF="$(NVMF)" ROUNDS="$(or $(ROUNDS),10)" tests/vm/vhost-user
	$(SUDO) env NVMFD="$(NVMFD)" NVMF="$(NVMF)" ROUNDS="$(or $(ROUNDS),10)" tests/vm/boot

# The tools of Ceph leave their output non-blocking: it is a pipe of its own, because the next program that writes more than the pipe
# takes would fail (`cat` did, and the output of guests was incomplete).
images: programs test-packages # Block devices on images of Ceph RBD, and a gateway group, on clusters that are started on this machine
	@$(call install,$(CEPH_PACKAGES) curl)
	@$(SUDO) env STORE_TESTS="$$($(call tests_of,nvmfd_blockdev))" NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" NVMF="$(NVMF)" \
	  tests/ceph/run small 2>&1 | cat

test-cluster: build ## Images of Ceph RBD, on a cluster that is started on this machine
	@$(call install,$(CEPH_PACKAGES) ceph-mgr fio curl iproute2 jq strace)
	@STORE_TESTS="$$($(call tests_of,nvmfd_blockdev))" DAEMON_TESTS="$$($(call tests_of,nvmfd))" NVMFD="$(NVMFD)" \
	  NVMFCTL="$(BUILD)"/release/nvmfctl NVMF="$(NVMF)" tests/ceph/run 2>&1 | cat

bench-cluster: build ## Measure an image of Ceph RBD through nvmfd beside fio with librbd
	@$(call install,$(CEPH_PACKAGES) ceph-mgr fio jq)
	NVMFD="$(NVMFD)" NVMF="$(NVMF)" tests/ceph/bench 2>&1 | cat

soak-cluster: build ## Three gateways with random faults, and a stock Linux host: make soak-cluster MINUTES=30
	@$(call install,$(CEPH_PACKAGES) iproute2)
	NVMFD="$(NVMFD)" NVMFCTL="$(BUILD)"/release/nvmfctl MINUTES="$(or $(MINUTES),30)" tests/ceph/soak 2>&1 | cat

mutants: test-packages ## Break one line of the safety code at a time, and see that the tests notice: make mutants ONLY="soft disk::"
	tests/mutants/run $(if $(SAMPLE),--sample $(SAMPLE)) $(ONLY)

some-mutants: # Two of those of the daemon, others for each commit: for rdma and initiator alone, cargo builds their dependencies again
	tests/mutants/run --sample 2 nvmfd

# Its tests have built the programs with the simulated network.
sim: packages ## Simulate hosts, network, target and disks: make sim SEEDS=10000 SWAPS=1000000
	$(CARGO) run --release -p tests --bin sim -- --seeds $(or $(SEEDS),1000)
	SEEDS=$(or $(SEEDS),1000) $(CARGO) test --release -p nvmfd-gateway --test simulation -- --nocapture
	SEEDS=$(or $(SEEDS),1000) $(CARGO) test --release -p initiator --test multipath -- neither_lost_nor_late
	SWAPS=$(or $(SWAPS),100000) $(CARGO) test --release -p nvmfd --test qpair loses_no_update -- --nocapture
	@$(MAKE) programs

demo: ## Watch it: target and host on this machine, no adapter, no kernel module, no root
	$(CARGO) build --profile demo --no-default-features -p nvmfd -p initiator
	NVMFD="$(BUILD)"/demo/nvmfd NVMFCTL="$(BUILD)"/demo/nvmfctl NVMF="$(BUILD)"/demo/nvmf tests/demo/demo "$(BUILD)"

record: packages programs ## Record the demonstrations: docs/src/demo.md, its picture docs/demo.svg, docs/src/first-run.md, a part of docs/src/nvmf.md
	@$(call install,libnbd-bin qemu-utils)
	NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" NVMF="$(NVMF)" tests/demo/demo "$(BUILD)" >"$(BUILD)"/demo.txt
	tests/demo/record demo "$(BUILD)"/demo.txt
	NVMFD="$(NVMFD)" NVMFCTL="$(NVMFCTL)" NVMF="$(NVMF)" tests/demo/unprivileged attach-demo >"$(BUILD)"/demo-attach.txt
	tests/demo/record attach "$(BUILD)"/demo-attach.txt
	$(GUEST) tests/vm/vm --kind uml run env NVMFD="$(NVMFD)" "$(CURDIR)"/tests/vm/demo >"$(BUILD)"/demo-guest.txt
	tests/demo/record guest "$(BUILD)"/demo-guest.txt

demo-guest: packages build ## Watch it with a stock Linux host, in a guest
	$(GUEST) tests/vm/vm --kind uml run env NVMFD="$(NVMFD)" "$(CURDIR)"/tests/vm/demo

bench: build test-packages ## Measure the soft fabric beside what this machine could do at best
	NVMFD="$(NVMFD)" NVMF="$(NVMF)" UDP_LIMITS="$(BUILD)"/release/udp_baseline tests/bench/run "$(BUILD)"

bench-attach: build test-packages ## Measure the exports of nvmf attach beside nvmf bench
	@$(call install,nbdkit)
	NVMFD="$(NVMFD)" NVMF="$(NVMF)" VHOST_USER_LOAD="$(BUILD)"/release/vhost_user_load tests/bench/attach

loss: build test-packages ## Measure what the soft fabric keeps of that in a bad network
	NVMFD="$(NVMFD)" NVMF="$(NVMF)" RELAY="$(BUILD)"/release/lossy_relay tests/bench/loss

scale: build test-packages ## Measure what a thousand subsystems or namespaces cost, and 64 hosts with 16 queues each
	NVMFD="$(NVMFD)" NVMF="$(NVMF)" MANY_HOSTS="$(BUILD)"/release/many_hosts tests/bench/scale

qos: build test-packages ## See that limits hold and are shared equally
	NVMFD="$(NVMFD)" NVMF="$(NVMF)" tests/bench/qos

mixed: build test-packages ## Measure what large writes of one host cost another one that reads 4 KiB
	$(SUDO) env NVMFD="$(NVMFD)" NVMF="$(NVMF)" tests/bench/mixed

cost: build test-packages ## Count the instructions that a command costs, which are the same each time
	COST="$(BUILD)"/release/instruction_count tests/bench/cost

structure: packages ## Measure the structure of the sources: import cycles, layers, sizes
	@$(CARGO) run --quiet -p tests --bin structure

bench-guests: packages build ## Measure it beside the kernel's target, in both kinds of guest
	$(GUEST) tests/vm/judge --kind uml bench
	$(GUEST) tests/vm/judge --kind qemu bench

PACKETS ?= 20000000
SECONDS_OF_FLOOD ?= 60
CAPSULES ?= 10000000
hostile: build test-packages ## Twenty million mutated packets, five million messages, ten million capsules, and floods, in memory and on sockets
	PACKETS=$(PACKETS) SECONDS=$(SECONDS_OF_FLOOD) SHARE=70 $(CARGO) test --release -p rdma --no-default-features \
	  --test soft_malformed -- --nocapture --test-threads 1
	NVMFD="$(NVMFD)" NVMF="$(NVMF)" ATTACKER="$(BUILD)"/release/flood SLOW="$(BUILD)"/release/slow_hosts FLOOD=$(SECONDS_OF_FLOOD) tests/bench/hostile
	NVMFD="$(NVMFD)" RAW="$(BUILD)"/release/raw_host CAPSULES=$(CAPSULES) tests/bench/capsules
	NVMFD="$(NVMFD)" RAW="$(BUILD)"/release/raw_host tests/bench/deaths

HOURS ?= 2
torture: build test-packages ## Every guarantee of docs/reliability.md at full size, then a soak: make torture HOURS=12
	NVMFD="$(NVMFD)" tests/torture --hours $(HOURS) $(ITEMS)

FUZZ := $(BUILD)/fuzz
TARGETS ?= authentication command config datagram endpoint message page queue session
fuzz: packages ## Let a fuzzer choose what peers send: make fuzz SECONDS=60 TARGETS="queue endpoint"
	@$(call install,g++)
	@$(CARGO) fuzz --version >/dev/null 2>&1 || { echo "make: first: cargo install cargo-fuzz" >&2; exit 1; }
	SEEDS="$(FUZZ)"/corpus $(CARGO) test -p tests --no-default-features --test fuzz
	@for target in $(TARGETS); do (set -x; \
	  RUSTC_BOOTSTRAP=1 $(CARGO) fuzz build --sanitizer none --target-dir "$(FUZZ)" $$target; \
	  mkdir -p "$(FUZZ)"/corpus/$$target; \
	  "$(FUZZ)"/$$(rustc -vV | sed -n 's/^host: //p')/release/$$target "$(FUZZ)"/corpus/$$target \
	    -artifact_prefix="$(FUZZ)"/$$target- -max_len=4096 -timeout=20 -print_final_stats=1 \
	    -max_total_time=$(or $(SECONDS),60)); \
	done

# The memory is our own, so leaks are what tests count themselves. Fewer cases of each property: the
# sanitizer sees a wrong access the first time.
SANITIZED := RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=0 PROPTEST_CASES=16 \
  CARGO_PROFILE_DEV_OPT_LEVEL=1 CARGO_PROFILE_DEV_DEBUG=line-tables-only CARGO_INCREMENTAL=0 $(CARGO) test \
  --target x86_64-unknown-linux-gnu --target-dir "$(BUILD)"/asan --no-default-features
asan: packages ## Pool, soft fabric, ring and queue under AddressSanitizer: most of it is the build
	$(SANITIZED) -p rdma --lib --test soft_qp --test soft_net --test soft_udp --test soft_reuseport --test soft_loss --test soft_wire
	$(SANITIZED) -p nvmfd-blockdev -p nvmfd-core -p nvmfd --lib --test qpair

# Needs a nightly toolchain with miri and rust-src.
miri: packages ## What reactors share without locks, under Miri: other interleavings and weak memory for each seed
	@$(CARGO) +nightly miri --version >/dev/null 2>&1 || { echo "make: first: rustup toolchain install nightly -c miri -c rust-src" >&2; exit 1; }
	MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-many-seeds=0..$(or $(SEEDS),32)" $(CARGO) +nightly miri test -p nvmfd \
	  --no-default-features --test concurrent --target-dir "$(BUILD)"/miri

PREFIX ?= /usr/local
SYSTEMD ?= $(PREFIX)/lib
DOC := $(DESTDIR)$(PREFIX)/share/doc/nvmfd
PROGRAMS := $(shell cd "$(BUILD)/release" 2>/dev/null && ls -d nvmfd nvmfctl nvmf 2>/dev/null)
# What was built is installed as it is: root needs no compiler.
install: ## Install what `make build` has built: make install PREFIX=/usr/local DESTDIR=
	cd "$(BUILD)"/release && install -D -m 755 -t "$(DESTDIR)$(PREFIX)"/bin $(PROGRAMS)
	install -d "$(DESTDIR)$(SYSTEMD)"/systemd/system
	for unit in nvmfd.service nvmfd.socket nvmf-attach@.service nvmf-attach-ublk@.service; do \
	  sed 's,/usr/bin/nvmf,$(PREFIX)/bin/nvmf,; s,/usr/share/doc,$(PREFIX)/share/doc,' configs/$$unit | \
	    install -m 644 /dev/stdin "$(DESTDIR)$(SYSTEMD)"/systemd/system/$$unit; \
	done
	install -D -m 644 configs/sysusers.conf "$(DESTDIR)$(SYSTEMD)"/sysusers.d/nvmfd.conf
	install -D -m 644 configs/tmpfiles.conf "$(DESTDIR)$(SYSTEMD)"/tmpfiles.d/nvmfd.conf
	install -D -m 644 -t "$(DOC)" README.md
	install -D -m 644 -t "$(DOC)"/docs docs/support.md docs/why.md
	install -D -m 644 -t "$(DOC)"/docs/src docs/src/*
	install -D -m 644 -t "$(DOC)"/examples configs/nvmfd.toml configs/notify-reload.conf configs/nvmf-attach.conf \
	  configs/nvmfd.container configs/nvmfd.volume configs/prometheus-alerts.yml configs/grafana-dashboard.json
	install -D -m 755 -t "$(DOC)"/examples configs/container-seccomp
	install -D -m 755 -t "$(DOC)"/examples/failover configs/failover/ana
	sed 's,/usr/bin/nvmf,$(PREFIX)/bin/nvmf,' configs/failover/standby.conf | install -m 644 /dev/stdin "$(DOC)"/examples/failover/standby.conf
	install -D -m 644 -t "$(DOC)"/examples/fio configs/fio/*
	umask 022; for program in $(PROGRAMS); do "$(BUILD)"/release/$$program install-files "$(DESTDIR)$(PREFIX)"/share; done

# Packages say which commit they are of; the same commit makes the same package.
VERSION := $(shell cargo_version=$$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1); \
  git describe --tags --exact-match 2>/dev/null | sed 's/^v//' | grep . || \
  echo "$$cargo_version+$$(git log -1 --format=%cd --date=format:%Y%m%d 2>/dev/null || echo 0).$$(git rev-parse --short=9 HEAD 2>/dev/null || echo source)")
deb: packages ## A Debian package of this commit: build/nvmfd_VERSION_ARCHITECTURE.deb
	@$(call install,binutils jq)
	NVMFD_VERSION=$(VERSION) $(CARGO) build --release -p nvmfd -p initiator
	configs/debian/build "$(BUILD)" $(VERSION)

rpm: packages ## The same as an RPM package, where rpmbuild is: build/nvmfd-VERSION-1.ARCHITECTURE.rpm
	@command -v rpmbuild >/dev/null || { echo "make: first: install rpmbuild (Debian: the package rpm)" >&2; exit 1; }
	@$(call install,binutils jq)
	NVMFD_VERSION=$(VERSION) $(CARGO) build --release -p nvmfd -p initiator
	configs/rpm/build "$(BUILD)" $(VERSION)

release: packages ## Archives, packages, container image, bill of materials and sums of this commit: build/release-VERSION
	@$(call install,binutils jq)
	configs/release "$(BUILD)" $(VERSION)

reproduce: ## Make the release twice in two directories, and compare
	tests/package/reproduce "$(BUILD)"

test-package: deb ## Install, start, use, upgrade, remove and purge the package under a real systemd, in a guest; the units of nvmf attach in another; a host's connections over reboots in a third
	@$(call install,debootstrap e2fsprogs lintian qemu-system-x86)
	$(SUDO) tests/package/run "$(BUILD)"/nvmfd_$(VERSION)_$$(dpkg --print-architecture).deb
	$(SUDO) tests/package/attach "$(BUILD)"/nvmfd_$(VERSION)_$$(dpkg --print-architecture).deb
	$(SUDO) tests/package/attach "$(BUILD)"/nvmfd_$(VERSION)_$$(dpkg --print-architecture).deb hosts-inside

test-distributions: deb ## Install and use the package in fresh roots of Debian 12 and 13, also by the Ansible role
	@$(call install,debootstrap jq)
	$(SUDO) tests/package/distributions "$(BUILD)"/nvmfd_$(VERSION)_$$(dpkg --print-architecture).deb

test-readme: ## Type the commands of README.md on a fresh Debian, and compare what they print: a quarter of an hour
	@$(call install,debootstrap e2fsprogs qemu-system-x86)
	$(SUDO) env "PATH=$$PATH" tests/package/readme

container: build ## Build the image of the Containerfile with podman, and try it; meant for a user without root
	@command -v podman >/dev/null && command -v jq >/dev/null || { echo "make: first: install podman and jq" >&2; exit 1; }
	podman build -t nvmfd --build-arg NVMFD_VERSION=$(VERSION) .
	NVMF="$(NVMF)" tests/package/container nvmfd

sbom: ## The bill of materials, as CycloneDX: build/nvmfd.cdx.json
	@$(call install,jq)
	@mkdir -p "$(BUILD)"
	NVMFD_VERSION=$(VERSION) configs/sbom >"$(BUILD)"/nvmfd.cdx.json

book: ## The book as HTML, where mdbook is installed: build/book/index.html
	@command -v mdbook >/dev/null || { echo "make: first: cargo install mdbook; or read docs/src" >&2; exit 1; }
	mdbook build docs

vm: packages build ## A terminal in a guest, to try things by hand
	@echo "The daemon is $(NVMFD); its files are here, below a throw-away overlay. Leave with: exit"
	$(GUEST) tests/vm/vm --kind uml shell

clean: ## Remove everything that was built
	$(SUDO) rm -rf build/vm-logs
	$(CARGO) clean
