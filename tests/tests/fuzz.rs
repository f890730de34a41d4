//! The functions of `make fuzz`, over bytes that real hosts and targets sent and over mutations of
//! them. `SEEDS=directory` writes these bytes down, for a fuzzer to begin with.

use std::fs;
use std::path::Path;

use nvme::auth::{Challenge, Failure, GroupId, HashId, Negotiate, Notice, Reply, Success1};
use rdma::soft::sim::Rng;
use tests::fuzz::TARGETS;

/// What one function begins with.
struct Seeds {
    /// Bytes that must get past the first look.
    good: Vec<Vec<u8>>,
    /// How many mutations are run.
    mutations: u64,
}

fn read(path: &str) -> Vec<u8> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    fs::read(root.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The files of a directory that end so.
fn files(directory: &str, end: &str) -> Vec<Vec<u8>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join(directory);
    let mut paths: Vec<_> = fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
    paths.retain(|path| path.to_string_lossy().ends_with(end));
    paths.sort();
    assert!(!paths.is_empty(), "{directory}");
    paths.into_iter().map(|path| fs::read(path).unwrap()).collect()
}

/// What UDP carried in the captures: one of each operation code and length.
fn datagrams() -> Vec<Vec<u8>> {
    let mut found = std::collections::BTreeMap::new();
    for capture in files("rdma/tests/golden", ".pcap") {
        let mut rest = &capture[24..];
        while let Some((head, tail)) = rest.split_at_checked(16) {
            let len = u32::from_le_bytes(head[8..12].try_into().unwrap()) as usize;
            let (frame, tail) = tail.split_at(len);
            rest = tail;
            if frame[12..14] == [8, 0] {
                let udp = u16::from_be_bytes([frame[38], frame[39]]);
                let datagram = &frame[42..34 + usize::from(udp)];
                // Of messages of connection management one of each kind.
                let kind = (datagram[0], datagram.len(), datagram.get(20 + 17).copied());
                let kind = if datagram[0] == 100 { kind } else { (kind.0, kind.1, None) };
                found.entry(kind).or_insert_with(|| datagram.to_vec());
            }
        }
    }
    found.into_values().collect()
}

fn hex(text: &str) -> Vec<u8> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let digits: String = lines.map(|line| line.rsplit(' ').next().unwrap()).collect();
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap();
    (0..digits.len()).step_by(2).map(byte).collect()
}

type Emit<'a> = &'a dyn Fn(&mut [u8]) -> Option<usize>;

/// Messages of an authentication, one of each kind.
fn messages() -> Vec<Vec<u8>> {
    let (hash, group) = (HashId::SHA256, GroupId::NULL);
    let negotiate = Negotiate::new(7, &[hash, HashId::SHA512], &[group, GroupId::FFDHE2048]);
    let (one, two) = ([1; 32], [2; 32]);
    let challenge = Challenge { t_id: 7, hash, group, seqnum: 9, challenge: &one, value: &[] };
    let (response, value) = (&two[..], &[][..]);
    let reply = Reply { t_id: 7, response, challenge: Some(&one), seqnum: 1, value };
    let success = Success1 { t_id: 7, digest_bytes: 32, response: Some(response) };
    let mut to = [0; 256];
    let mut all = Vec::new();
    let emits: [Emit<'_>; 6] = [
        &|to| negotiate.emit(to),
        &|to| challenge.emit(to),
        &|to| reply.emit(to),
        &|to| success.emit(to),
        &|to| Notice::Success2.emit(7, to),
        &|to| Notice::Failure1(Failure::INCORRECT_PAYLOAD).emit(7, to),
    ];
    for emit in emits {
        let len = emit(&mut to).unwrap();
        all.push(to[..len].to_vec());
    }
    all
}

/// Bytes that choose what happens: any will do.
fn choices(count: u64, bytes: usize) -> Vec<Vec<u8>> {
    let random = |seed| {
        let mut dice = Rng::new(seed);
        (0..bytes).map(|_| (dice.roll() >> 32) as u8).collect()
    };
    (0..count).map(random).collect()
}

fn seeds(name: &str) -> Seeds {
    let texts = || files("nvme/tests/vectors", ".hex");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (good, mutations) = match name {
        "command" => {
            let commands = hex(&text(read("nvme/tests/vectors/commands.hex")));
            (commands.chunks(64).map(<[u8]>::to_vec).collect(), 20_000)
        }
        "page" => {
            let mut pages: Vec<_> = texts().into_iter().map(|page| hex(&text(page))).collect();
            pages.iter_mut().for_each(|page| page.resize(page.len().clamp(512, 4096), 0));
            (pages, 1_000)
        }
        "config" => {
            let all = text(read("configs/nvmfd.toml"));
            // What is explained there but not set.
            let uncommented = all.lines().map(|line| line.strip_prefix("# ").unwrap_or(line));
            let uncommented: String = uncommented.flat_map(|line| [line, "\n"]).collect();
            // The same in two files.
            let two = all.replacen("\n[[subsystem]]", "\n\0[[subsystem]]", 1);
            (vec![all.into_bytes(), uncommented.into_bytes(), two.into_bytes()], 1_000)
        }
        "datagram" => (datagrams(), 20_000),
        "message" => {
            let all = datagrams().into_iter().filter(|datagram| datagram[0] == 100);
            (all.map(|datagram| datagram[20..20 + 256].to_vec()).collect(), 20_000)
        }
        "authentication" => (messages(), 20_000),
        "endpoint" => (choices(64, 400), 400),
        "queue" => (Vec::new(), 100),
        "session" => (Vec::new(), 400),
        other => panic!("no seeds of {other}"),
    };
    Seeds { good, mutations }
}

/// Changes, cuts or repeats something.
fn mutate(dice: &mut Rng, from: &[u8]) -> Vec<u8> {
    let mut bytes = from.to_vec();
    for _ in 0..=dice.below(4) {
        let at = dice.below(bytes.len() as u64 + 1) as usize;
        match dice.below(8) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, dice.roll() as u8),
            2 => bytes.extend_from_within(at..),
            _ => {
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = dice.roll() as u8;
                }
            }
        }
    }
    bytes
}

fn run(name: &str) {
    let (_, target) = TARGETS.iter().find(|(of, _)| *of == name).expect("a target");
    let Seeds { good, mutations } = seeds(name);
    if let Some(directory) = std::env::var_os("SEEDS") {
        let directory = Path::new(&directory).join(name);
        fs::create_dir_all(&directory).unwrap();
        for (number, seed) in good.iter().enumerate() {
            fs::write(directory.join(format!("seed-{number:03}")), seed).unwrap();
        }
    }
    target(&[]);
    for (number, seed) in good.iter().enumerate() {
        assert!(target(seed), "seed {number} of {name} is refused at the door");
    }
    // Inputs that a fuzzer has found, by the commit of the fix.
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for file in fs::read_dir(found.join("fuzz/found").join(name)).into_iter().flatten() {
        let path = file.unwrap().path();
        println!("{}", path.display());
        target(&fs::read(&path).unwrap());
    }
    let from = if good.is_empty() { choices(8, 600) } else { good };
    let mut dice = Rng::new(1);
    let mut reached = 0;
    for _ in 0..mutations {
        let at = dice.below(from.len() as u64) as usize;
        let bytes = mutate(&mut dice, &from[at]);
        reached += u64::from(target(&bytes));
    }
    assert!(reached > mutations / 10, "{reached} of {mutations} get past the first look");
}

#[test]
fn every_fuzz_target_has_a_program() {
    let text = String::from_utf8(read("fuzz/Cargo.toml")).unwrap();
    let manifest: toml::Table = text.parse().unwrap();
    let programs = manifest["bin"].as_array().unwrap();
    let names: Vec<_> = programs.iter().map(|program| program["name"].as_str().unwrap()).collect();
    let targets: Vec<_> = TARGETS.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, targets);
    for (name, program) in names.iter().zip(programs) {
        let code = read(&format!("fuzz/{}", program["path"].as_str().unwrap()));
        let calls = format!("tests::fuzz::{name}(data)");
        assert!(String::from_utf8(code).unwrap().contains(&calls), "{name}");
    }
}

macro_rules! each {
    ($($test:ident = $name:literal,)*) => {
        $(
            #[test]
            fn $test() {
                run($name);
            }
        )*

        #[test]
        fn every_fuzz_target_has_a_test() {
            let names: Vec<&str> = TARGETS.iter().map(|(name, _)| *name).collect();
            assert_eq!(names, [$($name),*]);
        }
    };
}

each! {
    authentications_survive_anything = "authentication",
    commands_survive_anything = "command",
    configurations_survive_anything = "config",
    datagrams_survive_anything = "datagram",
    endpoints_survive_anything = "endpoint",
    messages_survive_anything = "message",
    pages_survive_anything = "page",
    queues_survive_anything = "queue",
    sessions_survive_anything = "session",
}
