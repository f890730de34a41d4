//! Scenario of a seed: sizes, fault probabilities, and the workload.

use std::net::IpAddr;
use std::time::Duration;

use nvme::log::AnaState;
use nvmfd::core::subsystem::ana::ANA_STATES;
use rdma::soft::sim::{Faults, Rng};

use super::auth_keys::Proofs;
use super::device::DeviceFaults;
use super::oracle::blocks::SECTOR_BYTES;

/// A mishap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mishap {
    /// A host and the target do not hear each other for a while.
    Cut(usize, Duration),
    /// No host and the target hear each other for a while.
    CutAll(Duration),
    /// The network is at its worst for a while.
    Storm(Duration),
    /// The target is killed and starts again after a while; the disks have power.
    Kill(Duration),
    /// The target and its disks lose power for a while.
    PowerFailure(Duration),
    /// A host is switched off, says no goodbye, and starts again after a while.
    HostCrash(usize, Duration),
    /// A host closes its association in order, and makes a new one.
    Close(usize),
    /// A host drops its association, and makes a new one.
    Abort(usize),
    /// A host resets its controller under load, and makes a new association.
    Reset(usize),
    /// A host says nothing for a while, as if it stood still.
    Freeze(usize, Duration),
    /// A namespace is removed and comes back after a while.
    Remove(usize, Duration),
    /// A namespace is removed, and comes back after a while with another store.
    Exchange(usize, Duration),
    /// The subsystem is withdrawn and comes back after a while.
    Withdraw(Duration),
    /// The disks answer nothing for a while.
    Stall(Duration),
    /// A namespace has so many blocks for a while.
    Resize(usize, u32, Duration),
    /// A namespace is not for a host, for a while.
    Hide(usize, usize, Duration),
    /// On a path a namespace is in this state for a while.
    Reach(usize, usize, AnaState, Duration),
}

/// Parameters drawn at the beginning of a run.
#[derive(Clone, Debug)]
pub struct Profile {
    /// The target's address; hosts follow.
    pub v6: bool,
    /// Hosts.
    pub hosts: usize,
    /// Reactors of the target.
    pub reactors: usize,
    /// I/O queues that a host asks for.
    pub io_queues: u16,
    /// Their entries.
    pub entries: u16,
    /// What the hosts ask for as keep alive timeout.
    pub kato_ms: u32,
    /// Largest transfer.
    pub mdts_bytes: u32,
    /// Data of the target's pools.
    pub data_bytes: u64,
    /// Receives of the target's pools.
    pub receives: u32,
    /// Path MTU.
    pub mtu: u32,
    /// Packets unacknowledged at once.
    pub window: u32,
    /// Bytes of one read request.
    pub read_bytes: u32,
    /// The first wait for an acknowledgement.
    pub ack_timeout: Duration,
    /// Namespaces: blocks, bytes of a block.
    pub shapes: Vec<(u32, u32)>,
    /// Up to how many bytes the devices write all or nothing, whatever becomes of the power.
    pub atom_bytes: u32,
    /// The network.
    pub net: Faults,
    /// The network in a storm.
    pub storm: Faults,
    /// The disks.
    pub disk: DeviceFaults,
    /// What happens when so many commands have been sent.
    pub mishaps: Vec<(u32, Mishap)>,
    /// In a thousand commands: reads, writes, flushes, zeroes, deallocations, compares, admin
    /// commands, wrong commands.
    pub mix: [u16; 8],
    /// In a thousand commands those about reservations.
    pub orders: u16,
    /// Listeners, a path each; hosts take them in turn.
    pub paths: usize,
    /// Who proves who it is.
    pub proofs: Proofs,
    /// Two hosts are the two paths of one machine.
    pub twins: bool,
    /// In a thousand commands those that protect a namespace from writes.
    pub protections: u16,
    /// In a thousand commands those that abort another.
    pub aborts: u16,
    /// In a thousand commands those that delete a queue.
    pub departures: u16,
    /// In a thousand commands those that make blocks unreadable.
    pub spoils: u16,
    /// In a thousand commands those about namespaces that hosts make; 0: none may.
    pub managing: u16,
    /// In a thousand commands copies.
    pub copies: u16,
    /// In a thousand commands those that format a namespace.
    pub formats: u16,
    /// A format may give it blocks of another size.
    pub reshapes: bool,
    /// In a thousand writes those with FUA.
    pub fua: u16,
    /// In a thousand ranges those in the first few blocks.
    pub hot: u16,
    /// In a thousand commands those after which a host pauses.
    pub pause: u16,
    /// For so long at most.
    pub pause_for: Duration,
    /// A turn of anybody takes so long at most.
    pub turn: Duration,
}

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
    /// What a seed stands for, in a run of so many commands.
    #[must_use]
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
                // Whatever it is, it is not the other path of a machine that can.
                profile.twins = false;
                Proofs::AllBut(hosts - 1)
            }
            _ => Proofs::None,
        };
        profile.spoils = pick(dice, &[0, 0, 10, 40]);
        profile.copies = pick(dice, &[0, 0, 20, 100]);
        profile.managing = pick(dice, &[0, 0, 50, 200]);
        // Who has reserved or protected a namespace has not reserved or protected the next one.
        if profile.orders == 0 && profile.protections == 0 {
            let more = pick(dice, &[0, 1, 3]);
            profile.mishaps.extend((0..more).map(|_| exchange(dice, commands)));
            profile.mishaps.sort_by_key(|(at, _)| *at);
        }
        profile.departures = pick(dice, &[0, 5, 20]);
        profile.formats = pick(dice, &[0, 0, 5]);
        let some = |what: fn(&Mishap) -> bool| profile.mishaps.iter().any(|(_, m)| what(m));
        // Which of two stores was formatted is more than hosts know.
        if some(|mishap| matches!(mishap, Mishap::Exchange(..))) {
            profile.formats = 0;
        }
        // What lies beyond the end of a namespace keeps the blocks that it had.
        let resized = some(|mishap| matches!(mishap, Mishap::Resize(..)));
        profile.reshapes = profile.formats > 0 && !resized;
        // A copy of a torn block is as torn, and hosts expect whole blocks of what they have made.
        if (profile.copies, profile.managing) == (0, 0) {
            profile.atom_bytes = pick(dice, &[512, 4096]);
        }
        profile
    }

    /// Sectors of a namespace, at most.
    #[must_use]
    pub fn sectors(&self, space: usize) -> u32 {
        self.shapes[space].0 << self.shift(space)
    }

    /// log2 of the sectors in a block of a namespace, before anybody formats it.
    #[must_use]
    pub fn shift(&self, space: usize) -> u8 {
        (self.shapes[space].1 / SECTOR_BYTES).trailing_zeros() as u8
    }

    /// How long the disks may answer nothing: as long as they ever do, once after the other.
    #[must_use]
    pub fn longest_stall(&self) -> Duration {
        let stalls = self.mishaps.iter().map(|(_, mishap)| match mishap {
            Mishap::Stall(time) => *time,
            _ => Duration::ZERO,
        });
        stalls.sum()
    }

    /// The path by which a host comes.
    #[must_use]
    pub fn path(&self, host: usize) -> usize {
        host % self.paths
    }

    /// Which machine a host is, or is a path of.
    #[must_use]
    pub fn machine(&self, host: usize) -> usize {
        if self.twins { host / 2 } else { host }
    }

    /// Whether the target may have no receives left for what the hosts were granted: grants are
    /// made before the queues are connected, to several hosts at once.
    #[must_use]
    pub fn is_cramped(&self) -> bool {
        let of_host = 32 + u32::from(self.io_queues) * u32::from(self.entries);
        self.hosts as u32 * of_host + 64 >= self.receives
    }

    /// The target's address, or that of a host, counted from 0.
    #[must_use]
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
        // Sixteen of the 32 bits of the check are not seen on IPv4: one damage in 65536 stays.
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
        // Longer than hosts wait for a command.
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
