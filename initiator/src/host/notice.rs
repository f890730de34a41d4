//! What has happened to paths, as lines of a log: which path, why, and what happens next.

use std::fmt::Write;

use nvme::log::AnaState;
use tracing::{info, warn};

use crate::multipath::{Multipath, Notice, PathState};

/// Logs a notice. So many clients know another size of the namespace.
pub(super) fn report(machine: &Multipath, notice: &Notice, stale_clients: usize) {
    match notice {
        Notice::Live { path, ana } => info!("{} is live{}", name(machine, *path), state_of(*ana)),
        Notice::Failed { path, why, next: Some(next) } => {
            let (name, next_s) = (name(machine, *path), next.as_secs_f32());
            warn!("{name}: {why}; it is connected again in {next_s:.0} s{}", meanwhile(machine));
        }
        Notice::Failed { path, why, next: None } => {
            warn!("{}: {why}; it is given up{}", name(machine, *path), meanwhile(machine));
        }
        Notice::Ana { path, state } => {
            warn!("{} is {}{}", name(machine, *path), text(*state), meanwhile(machine));
        }
        Notice::Resized { blocks } => {
            info!("the namespace has {blocks} blocks{}", stale(stale_clients));
        }
        Notice::Removed { path } => {
            warn!("{} has no such namespace (any more)", name(machine, *path));
        }
    }
}

/// What clients that are connected have to do after a change of the size: NBD cannot tell them.
fn stale(clients: usize) -> String {
    match clients {
        0 => String::new(),
        1 => "; the client that is connected keeps the old size until it connects again".into(),
        n => format!("; {n} connections of clients keep the old size until they connect again"),
    }
}

/// Returns the state of all paths, for clients that list exports.
pub(super) fn describe(machine: &Multipath) -> String {
    let mut text = String::new();
    if let Some(options) = machine.path_options(0) {
        let _ = write!(text, "{}", options.session.subnqn);
    }
    for path in 0..machine.paths() {
        let state = match machine.state(path) {
            PathState::Connecting => "connecting",
            PathState::Live => "live",
            PathState::Resetting { .. } => "down",
            PathState::Lost => "given up",
        };
        let ana = state_of(machine.ana(path));
        let _ = write!(text, "; {} {state}{ana}", name(machine, path));
    }
    text
}

/// What happens to requests.
fn meanwhile(machine: &Multipath) -> &'static str {
    let usable = |path| {
        let good = |state| matches!(state, AnaState::OPTIMIZED | AnaState::NON_OPTIMIZED);
        machine.state(path) == PathState::Live && machine.ana(path).is_none_or(good)
    };
    match (0..machine.paths()).any(usable) {
        true => "",
        false if machine.is_lost() => "; requests fail",
        false => "; requests wait",
    }
}

fn name(machine: &Multipath, path: usize) -> String {
    let to = machine.path_options(path).map(|options| options.session.to.to_string());
    format!("path {}", to.unwrap_or_default())
}

fn state_of(ana: Option<AnaState>) -> String {
    ana.map(|state| format!(", {}", text(state))).unwrap_or_default()
}

fn text(state: AnaState) -> &'static str {
    state.name().unwrap_or("in an unknown ANA state")
}
