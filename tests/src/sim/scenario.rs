//! Scenario of a seed: sizes, fault probabilities, and the workload.

use std::net::IpAddr;
use std::time::Duration;

use nvme::log::AnaState;
use nvmfd::core::subsystem::ana::ANA_STATES;
use nvmfd::core::subsystem::rate_limit::Limit;
use rdma::soft::sim::{Faults, Rng};

use super::auth_keys::Proofs;
use super::device::DeviceFaults;
use super::oracle::blocks::SECTOR_BYTES;

/// A fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mishap {
    /// A host and the target are disconnected for a while.
    Cut(usize, Duration),
    /// All hosts and the target are disconnected for a while.
    CutAll(Duration),
    /// The network has its highest fault rates for a while.
    Storm(Duration),
    /// The target is killed and restarts after a while; the devices keep power.
    Kill(Duration),
    /// The target and its devices lose power for a while.
    PowerFailure(Duration),
    /// A host is switched off, without a disconnect, and restarts after a while.
    HostCrash(usize, Duration),
    /// A host closes its association with a shutdown, and makes a new one.
    Close(usize),
    /// A host drops its association, and makes a new one.
    Abort(usize),
    /// A host resets its controller under load, and makes a new association.
    Reset(usize),
    /// A host stalls for a while.
    Freeze(usize, Duration),
    /// A namespace is removed and added again after a while.
    Remove(usize, Duration),
    /// A namespace is removed, and added again after a while with another backing store.
    Exchange(usize, Duration),
    /// The device of a namespace is removed, without what is not durable, and returns after a while.
    Unplug(usize, Duration),
    /// The subsystem is withdrawn and published again after a while.
    Withdraw(Duration),
    /// The devices stall for a while.
    Stall(Duration),
    /// A namespace has this number of blocks for a while.
    Resize(usize, u32, Duration),
    /// A namespace is hidden from a host for a while.
    Hide(usize, usize, Duration),
    /// On a path a namespace has this ANA state for a while.
    Reach(usize, usize, AnaState, Duration),
    /// The backing store of a namespace is copied at one moment; that, with the wait for earlier
    /// changes, takes a while.
    Snapshot(usize, Duration),
}

/// Parameters drawn at the beginning of a run.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Whether addresses are IPv6.
    pub v6: bool,
    /// Number of hosts.
    pub hosts: usize,
    /// Number of reactors of the target.
    pub reactors: usize,
    /// I/O queues that a host requests.
    pub io_queues: u16,
    /// Their entries.
    pub entries: u16,
    /// Keep alive timeout that hosts request.
    pub kato_ms: u32,
    /// MDTS.
    pub mdts_bytes: u32,
    /// Bytes of data buffers in the target's pools.
    pub data_bytes: u64,
    /// Receives of the target's pools.
    pub receives: u32,
    /// Path MTU.
    pub mtu: u32,
    /// Maximum of unacknowledged packets.
    pub window: u32,
    /// Bytes of one read request of the transport.
    pub read_bytes: u32,
    /// The first ack timeout.
    pub ack_timeout: Duration,
    /// Namespaces: blocks, bytes of a block.
    pub shapes: Vec<(u32, u32)>,
    /// Power-fail write unit of the devices, in bytes.
    pub atom_bytes: u32,
    /// Faults of the network.
    pub net: Faults,
    /// Faults of the network in a storm.
    pub storm: Faults,
    /// Faults of the devices.
    pub disk: DeviceFaults,
    /// Injected faults, and the number of commands after which each is due.
    pub mishaps: Vec<(u32, Mishap)>,
    /// Per mille of commands: reads, writes, flushes, zeroes, deallocations, compares, admin
    /// commands, invalid commands.
    pub mix: [u16; 8],
    /// Reservation requests per mille of commands.
    pub orders: u16,
    /// Reservations are persistent (PTPL).
    pub persistent: bool,
    /// Number of listeners, a path each; hosts use them in turn.
    pub paths: usize,
    /// Hosts that must authenticate.
    pub proofs: Proofs,
    /// Two hosts are the two paths of one machine.
    pub twins: bool,
    /// Write protections per mille of commands.
    pub protections: u16,
    /// Aborts per mille of commands.
    pub aborts: u16,
    /// Deleted queues per mille of commands.
    pub departures: u16,
    /// Write Uncorrectable per mille of commands.
    pub spoils: u16,
    /// Namespace commands per mille of commands; 0: not permitted.
    pub managing: u16,
    /// Copies per mille of commands.
    pub copies: u16,
    /// Formats per mille of commands.
    pub formats: u16,
    /// Whether a format may change the block size.
    pub reshapes: bool,
    /// Rate limits, of which each publication of the subsystem uses others; none: unlimited.
    pub limits: &'static [Option<Limit>],
    /// Writes with FUA per mille of writes.
    pub fua: u16,
    /// Ranges in the first few blocks per mille of ranges.
    pub hot: u16,
    /// Pauses of a host per mille of commands.
    pub pause: u16,
    /// Maximum of a pause.
    pub pause_for: Duration,
    /// Maximum duration of an iteration.
    pub turn: Duration,
}

/// Limits of a profile, of which every publication uses others. They delay a full queue by less than
/// the timeout of a command.
pub const LIMITS: [Option<Limit>; 4] = [
    Some(Limit { iops: Some(2_000), bandwidth: None, burst_ms: 1 }),
    None,
    Some(Limit { iops: None, bandwidth: Some(4 << 20), burst_ms: 10 }),
    Some(Limit { iops: Some(20_000), bandwidth: Some(16 << 20), burst_ms: 100 }),
];

const MIXES: [[u16; 8]; 4] = [
    [420, 380, 40, 40, 30, 40, 30, 20],
    [100, 700, 100, 40, 30, 10, 10, 10],
    [800, 120, 20, 10, 10, 20, 10, 10],
    [250, 250, 150, 120, 120, 60, 30, 20],
];

fn pick<T: Copy>(dice: &mut Rng, from: &[T]) -> T {
    from[dice.below(from.len() as u64) as usize]
}

fn micros(dice: &mut Rng, from: u64, to: u64) -> Duration {
    Duration::from_micros(from + dice.below(to - from + 1))
}

impl Profile {
    /// The profile of a seed, for a run of this number of commands.
    pub fn new(seed: u64, commands: u32) -> Profile {
        let dice = &mut Rng::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5eed);
        for _ in 0..8 {
            dice.roll();
        }
        let v6 = dice.per_mille(700);
        let hosts = pick(dice, &[1, 1, 2, 2, 3]);
        let net = network(dice, v6);
        let mut profile = Profile {
            v6,
            hosts,
            reactors: pick(dice, &[1, 1, 2, 3]),
            io_queues: pick(dice, &[1, 1, 2, 3]),
            entries: pick(dice, &[2, 4, 8, 16, 32]),
            kato_ms: pick(dice, &[1000, 2000, 5000]),
            mdts_bytes: pick(dice, &[8 << 10, 16 << 10, 64 << 10]),
            data_bytes: 0,
            receives: pick(dice, &[384, 768]),
            mtu: pick(dice, &[256, 512, 1024, 1024, 2048, 4096, 4096]),
            window: pick(dice, &[4, 16, 64, 128]),
            read_bytes: pick(dice, &[1 << 10, 8 << 10, 64 << 10]),
            ack_timeout: pick(dice, &[2_000, 10_000, 67_000].map(Duration::from_micros)),
            shapes: vec![(256, 512), (64, 4096)],
            atom_bytes: 4096,
            net,
            storm: Faults { loss: 300, duplicate: 100, reorder: 500, ..net },
            disk: disk(dice),
            mishaps: Vec::new(),
            mix: pick(dice, &MIXES),
            orders: 0,
            persistent: false,
            aborts: 0,
            protections: 0,
            departures: 0,
            spoils: 0,
            managing: 0,
            copies: 0,
            formats: 0,
            reshapes: false,
            paths: 1,
            twins: false,
            proofs: Proofs::None,
            limits: &[],
            fua: pick(dice, &[0, 100, 500]),
            hot: pick(dice, &[0, 300, 800]),
            pause: pick(dice, &[0, 20, 200]),
            pause_for: pick(dice, &[1_000, 100_000, 3_000_000].map(Duration::from_micros)),
            turn: micros(dice, 0, 5),
        };
        let least = 2 * u64::from(profile.mdts_bytes) + (256 << 10);
        profile.data_bytes = least + pick(dice, &[0, 64 << 10, 1 << 20]);
        profile.mishaps = mishaps(dice, hosts, commands);
        profile.orders = if hosts > 1 { pick(dice, &[0, 10, 50]) } else { 0 };
        profile.aborts = pick(dice, &[0, 0, 10, 100]);
        profile.protections = pick(dice, &[0, 0, 5]);
        let more = pick(dice, &[0, 0, 1, 2, 6]);
        profile.mishaps.extend((0..more).map(|_| scope(dice, hosts, commands)));
        if dice.per_mille(500) {
            profile.paths = 2;
            (profile.twins, profile.orders) = (hosts > 1, 0);
            let more = pick(dice, &[1, 2, 6]);
            profile.mishaps.extend((0..more).map(|_| reach(dice, commands)));
        }
        profile.mishaps.sort_by_key(|(at, _)| *at);
        profile.proofs = match dice.below(6) {
            0 => Proofs::All,
            1 if hosts > 1 => {
                // A host without the secret is not the other path of a host with it.
                profile.twins = false;
                Proofs::AllBut(hosts - 1)
            }
            _ => Proofs::None,
        };
        profile.spoils = pick(dice, &[0, 0, 10, 40]);
        profile.copies = pick(dice, &[0, 0, 20, 100]);
        profile.managing = pick(dice, &[0, 0, 50, 200]);
        // Reservations and write protections do not apply to another backing store.
        if profile.orders == 0 && profile.protections == 0 {
            let more = pick(dice, &[0, 1, 3]);
            profile.mishaps.extend((0..more).map(|_| exchange(dice, commands)));
            profile.mishaps.sort_by_key(|(at, _)| *at);
        }
        profile.departures = pick(dice, &[0, 5, 20]);
        profile.formats = pick(dice, &[0, 0, 5]);
        let some = |what: fn(&Mishap) -> bool| profile.mishaps.iter().any(|(_, m)| what(m));
        // Hosts do not know which of two backing stores was formatted.
        if some(|mishap| matches!(mishap, Mishap::Exchange(..))) {
            profile.formats = 0;
        }
        // Blocks beyond the end of a namespace keep their size.
        let resized = some(|mishap| matches!(mishap, Mishap::Resize(..)));
        profile.reshapes = profile.formats > 0 && !resized;
        // A copy of a torn block is torn as well, and in host-created namespaces hosts expect whole
        // blocks.
        if (profile.copies, profile.managing) == (0, 0) {
            profile.atom_bytes = pick(dice, &[512, 4096]);
        }
        profile.persistent = dice.per_mille(500);
        // The oracles of marks, formats and reservations do not know of data that are lost while
        // the target runs.
        if (profile.spoils, profile.formats) == (0, 0) && dice.per_mille(300) {
            profile.add_removals(dice, commands);
        }
        let more = pick(dice, &[0, 0, 3, 10]);
        profile.mishaps.extend((0..more).map(|_| snapshot(dice, commands)));
        profile.mishaps.sort_by_key(|(at, _)| *at);
        profile.limits = if dice.per_mille(300) { &LIMITS } else { &[] };
        profile
    }

    /// The same with this number of reactors, and with I/O queues for all of them.
    pub fn with_reactors(self, reactors: usize) -> Profile {
        let io_queues = self.io_queues.max(reactors.div_ceil(self.hosts) as u16);
        let entries = self.entries.min(8);
        let of_host = 32 + u32::from(io_queues) * u32::from(entries);
        let receives = self.receives.max(self.hosts as u32 * of_host + 65);
        Profile { reactors, io_queues, entries, receives, ..self }
    }

    /// Devices are removed and return.
    pub fn add_removals(&mut self, dice: &mut Rng, commands: u32) {
        // The oracle knows torn blocks of a power failure only.
        self.atom_bytes = 4096;
        let more = pick(dice, &[1, 3]);
        self.mishaps.extend((0..more).map(|_| unplug(dice, commands)));
        self.mishaps.sort_by_key(|(at, _)| *at);
    }

    /// Whether devices are removed.
    pub fn loses_devices(&self) -> bool {
        self.mishaps.iter().any(|(_, mishap)| matches!(mishap, Mishap::Unplug(..)))
    }

    /// Maximum of sectors of a namespace.
    pub fn sectors(&self, space: usize) -> u32 {
        self.shapes[space].0 << self.shift(space)
    }

    /// log2 of the sectors in a block of a namespace, before any format.
    pub fn shift(&self, space: usize) -> u8 {
        (self.shapes[space].1 / SECTOR_BYTES).trailing_zeros() as u8
    }

    /// Longest stall of the devices, including repeated ones.
    pub fn longest_stall(&self) -> Duration {
        let stalls = self.mishaps.iter().map(|(_, mishap)| match mishap {
            Mishap::Stall(time) => *time,
            _ => Duration::ZERO,
        });
        stalls.sum()
    }

    /// The path of a host.
    pub fn path(&self, host: usize) -> usize {
        host % self.paths
    }

    /// The machine of a host.
    pub fn machine(&self, host: usize) -> usize {
        if self.twins { host / 2 } else { host }
    }

    /// Whether the target may lack receives for the queues that it has granted: queues are granted
    /// before they are connected, to several hosts at once.
    pub fn is_cramped(&self) -> bool {
        let of_host = 32 + u32::from(self.io_queues) * u32::from(self.entries);
        self.hosts as u32 * of_host + 64 >= self.receives
    }

    /// The target's address, or that of a host, counted from 0.
    pub fn address(&self, host: Option<usize>) -> IpAddr {
        let number = host.map_or(1, |host| host as u16 + 2);
        match self.v6 {
            // Each in a subnet of its own: addresses of one subnet are one source.
            true => IpAddr::from([0xfd00, 0, 0, number, 0, 0, 0, 1]),
            false => IpAddr::from([10, 0, 0, number as u8]),
        }
    }
}

fn network(dice: &mut Rng, v6: bool) -> Faults {
    let clean = dice.per_mille(250);
    let mut chance = |most: &[u16]| if clean { 0 } else { pick(dice, most) };
    Faults {
        loss: chance(&[0, 2, 10, 20]),
        duplicate: chance(&[0, 5, 50]),
        // On IPv4 the check has only 16 of its 32 bits: one damaged packet in 65536 is not
        // detected.
        damage: if v6 { chance(&[0, 2, 10]) } else { 0 },
        reorder: chance(&[0, 10, 100]),
        delay: micros(dice, 5, 200),
        jitter: micros(dice, 10, 2_000),
    }
}

fn disk(dice: &mut Rng) -> DeviceFaults {
    let sound = dice.per_mille(400);
    let mut chance = |most: &[u16]| if sound { 0 } else { pick(dice, most) };
    DeviceFaults {
        error: chance(&[0, 2, 20]),
        short: chance(&[0, 20, 200]),
        sync_error: chance(&[0, 0, 0, 10]),
        slow: chance(&[0, 2, 20]),
        latency: micros(dice, 5, 200),
        jitter: micros(dice, 0, 300),
        stall: micros(dice, 1_000, 800_000),
        punch: dice.per_mille(800),
        zero_range: dice.per_mille(800),
    }
}

fn mishaps(dice: &mut Rng, hosts: usize, commands: u32) -> Vec<(u32, Mishap)> {
    let count = pick(dice, &[0, 1, 2, 4, 8]);
    let mut list: Vec<_> = (0..count).map(|_| mishap(dice, hosts, commands)).collect();
    list.sort_by_key(|(at, _)| *at);
    list
}

fn scope(dice: &mut Rng, hosts: usize, commands: u32) -> (u32, Mishap) {
    let space = dice.below(2) as usize;
    let long = pick(dice, &[500, 50_000, 2_000_000]);
    let time = micros(dice, long / 2, long);
    let mishap = match dice.below(9) {
        // Longer than the command timeout of hosts.
        0 => Mishap::Stall(Duration::from_secs(31)),
        1..=4 => Mishap::Resize(space, 1 + dice.below(63) as u32, time),
        _ => Mishap::Hide(space, dice.below(hosts as u64) as usize, time),
    };
    (dice.below(u64::from(commands).max(1)) as u32, mishap)
}

fn exchange(dice: &mut Rng, commands: u32) -> (u32, Mishap) {
    let long = pick(dice, &[1, 500, 50_000]);
    let mishap = Mishap::Exchange(dice.below(2) as usize, micros(dice, long / 2, long));
    (dice.below(u64::from(commands).max(1)) as u32, mishap)
}

fn unplug(dice: &mut Rng, commands: u32) -> (u32, Mishap) {
    let long = pick(dice, &[500, 50_000, 2_000_000]);
    let mishap = Mishap::Unplug(dice.below(2) as usize, micros(dice, long / 2, long));
    (dice.below(u64::from(commands).max(1)) as u32, mishap)
}

fn snapshot(dice: &mut Rng, commands: u32) -> (u32, Mishap) {
    let long = pick(dice, &[500, 50_000, 2_000_000]);
    let mishap = Mishap::Snapshot(dice.below(2) as usize, micros(dice, long / 2, long));
    (dice.below(u64::from(commands).max(1)) as u32, mishap)
}

fn reach(dice: &mut Rng, commands: u32) -> (u32, Mishap) {
    let (path, space) = (dice.below(2) as usize, dice.below(2) as usize);
    let state = pick(dice, &ANA_STATES);
    let long = pick(dice, &[500, 50_000, 2_000_000]);
    let mishap = Mishap::Reach(path, space, state, micros(dice, long / 2, long));
    (dice.below(u64::from(commands).max(1)) as u32, mishap)
}

fn mishap(dice: &mut Rng, hosts: usize, commands: u32) -> (u32, Mishap) {
    let host = dice.below(hosts as u64) as usize;
    let long = pick(dice, &[500, 50_000, 2_000_000, 12_000_000]);
    let time = micros(dice, long / 2, long);
    let mishap = match dice.below(13) {
        0 => Mishap::Cut(host, time),
        1 => Mishap::CutAll(time),
        2 => Mishap::Storm(time),
        3 => Mishap::Kill(time),
        4 | 5 => Mishap::PowerFailure(time),
        6 => Mishap::HostCrash(host, time),
        7 => Mishap::Close(host),
        8 => Mishap::Abort(host),
        9 => Mishap::Freeze(host, time),
        10 => Mishap::Reset(host),
        11 => Mishap::Remove(dice.below(2) as usize, time),
        _ => Mishap::Withdraw(time),
    };
    (dice.below(u64::from(commands).max(1)) as u32, mishap)
}
