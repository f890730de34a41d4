//! A raw NVMe/RDMA host: sends arbitrary capsules and checks that each response is exactly the
//! specified one. One line per check.

mod admin;
mod connecting;
mod dying;
mod fixture;
mod fused;
mod host;
mod immediate;
mod io;
mod malformed;

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use crate::fixture::{Names, Outcome, Tally, World};
use crate::host::Host;
use nvme::Nqn;

const USAGE: &str = "usage: raw_host ADDRESS:PORT SUBSYSTEM-NQN HOST-NQN OTHER-HOST-NQN \
                     [--iwarp] [--soft FROM] [--seed N] [--capsules N] [--pairs N] [--only PART]
                     [--storm SECONDS] [--die-at STAGE]
The subsystem serves namespace 1 with blocks of 4096 bytes and namespace 2 with blocks of 512, to
these two hosts and to no other. What is on them is lost.";

type Part = fn(&mut World) -> Outcome;

struct Arguments {
    to: SocketAddr,
    names: Names,
    iwarp: bool,
    soft: Option<IpAddr>,
    seed: u64,
    capsules: u32,
    pairs: u32,
    only: Option<String>,
    storm: Option<u64>,
    die_at: Option<String>,
}

fn arguments() -> Option<Arguments> {
    let mut words = std::env::args().skip(1);
    let to = words.next()?.parse().ok()?;
    let mut nqn = || words.next()?.parse::<Nqn>().ok();
    let names = Names { subnqn: nqn()?, host: nqn()?, other: nqn()? };
    let (seed, capsules, pairs, only, storm, die_at) = (1, 4000, 400, None, None, None);
    let mut found = Arguments {
        to,
        names,
        iwarp: false,
        soft: None,
        seed,
        capsules,
        pairs,
        only,
        storm,
        die_at,
    };
    while let Some(word) = words.next() {
        match word.as_str() {
            "--iwarp" => found.iwarp = true,
            "--soft" => found.soft = Some(words.next()?.parse().ok()?),
            "--seed" => found.seed = words.next()?.parse().ok()?,
            "--capsules" => found.capsules = words.next()?.parse().ok()?,
            "--pairs" => found.pairs = words.next()?.parse().ok()?,
            "--storm" => found.storm = Some(words.next()?.parse().ok()?),
            "--only" => found.only = Some(words.next()?),
            "--die-at" => found.die_at = Some(words.next()?),
            _ => return None,
        }
    }
    Some(found)
}

fn main() -> ExitCode {
    let Some(arguments) = arguments() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match run(arguments) {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

fn run(arguments: Arguments) -> bool {
    let Arguments { to, names, iwarp, soft, seed, capsules, pairs, only, storm, die_at } =
        arguments;
    let mut tally = Tally::default();
    let host = match Host::new(to, soft) {
        Ok(host) => host,
        Err(e) => {
            tally.check("the raw host starts", false, || e.to_string());
            return tally.close();
        }
    };
    let mut world = World { host, names, tally, iwarp, kato_ms: 0 };
    if let Some(seconds) = storm {
        let private_data = world.admin_attempt().request.emit();
        let limit = Duration::from_secs(seconds);
        let (up, in_vain) = world.host.storm(&private_data, limit);
        println!("{up} connections came up, {in_vain} did not");
        return world.host.is_whole().is_ok();
    }
    if let Some(stage) = die_at {
        let outcome = dying::die_at(&mut world, &stage);
        world.tally.check(&format!("stage {stage} is reached"), false, || format!("{outcome:?}"));
        return world.tally.close();
    }
    // The first connection also registers the window of all commands.
    let request = world.admin_attempt().request;
    match world.open(request) {
        Ok(queue) => world.close([queue]),
        Err(reason) => {
            world.tally.check("the target answers", false, || format!("{reason:?}"));
            return world.tally.close();
        }
    }
    let parts: [(&str, Part); 11] = [
        ("requests", connecting::requests),
        ("before", connecting::before_connect),
        ("connect", connecting::connect_admin),
        ("connect-io", connecting::connect_io),
        ("properties", admin::properties),
        ("untimely", admin::untimely),
        ("admin", admin::commands),
        ("events", admin::events),
        ("io", io::commands),
        ("framing", malformed::framing),
        ("immediate", immediate::data),
    ];
    let wanted = |name: &str| only.as_ref().is_none_or(|only| only == name);
    for (name, part) in parts.iter().filter(|(name, _)| wanted(name)) {
        let outcome = part(&mut world);
        world.tally.check(&format!("part {name} ran to its end"), outcome.is_ok(), || {
            outcome.err().unwrap_or_default()
        });
    }
    type Seeded = fn(&mut World, u64, u32) -> Outcome;
    let seeded: [(&str, Seeded, u32); 2] =
        [("fused", fused::ordering, pairs), ("random", malformed::random, capsules)];
    for (name, part, count) in seeded.into_iter().filter(|(name, ..)| wanted(name)) {
        let outcome = part(&mut world, seed, count);
        world.tally.check(&format!("part {name} ran to its end"), outcome.is_ok(), || {
            outcome.err().unwrap_or_default()
        });
    }
    let whole = world.host.is_whole();
    world.tally.check("every buffer of the raw host came home", whole.is_ok(), || {
        whole.err().unwrap_or_default()
    });
    world.tally.close()
}
