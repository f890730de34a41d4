//! What has happened to paths, as lines of a log: which path, why, and what happens next.

use std::fmt::Write;
use std::time::Instant;

use nvme::log::AnaState;
use tracing::{info, warn};

use crate::multipath::{Multipath, Notice, PathState, RequestOutcome};

/// Logs a notice.
pub(super) fn report(multipath: &Multipath, notice: &Notice) {
    match notice {
        Notice::Live { path, ana } => info!("{} is live{}", name(multipath, *path), state_of(*ana)),
        Notice::Failed { path, why, next: Some(next) } => {
            let (name, next_s) = (name(multipath, *path), next.as_secs_f32());
            warn!("{name}: {why}; it is connected again in {next_s:.0} s{}", meanwhile(multipath));
        }
        Notice::Failed { path, why, next: None } => {
            warn!("{}: {why}; it is given up{}", name(multipath, *path), meanwhile(multipath));
        }
        Notice::Ana { path, state } => {
            warn!("{} is {}{}", name(multipath, *path), text(*state), meanwhile(multipath));
        }
        Notice::Resized { blocks } => {
            info!("the namespace has {blocks} blocks");
        }
        Notice::WriteProtection { is_on: true } => warn!("the namespace is write protected"),
        Notice::WriteProtection { is_on: false } => {
            info!("the namespace is not write protected any more");
        }
        Notice::Removed { path } => {
            let (name, meanwhile) = (name(multipath, *path), meanwhile(multipath));
            warn!("{name} has no such namespace (any more){meanwhile}");
        }
    }
}

/// Returns the state of all paths, for clients that list exports.
pub(crate) fn describe(multipath: &Multipath) -> String {
    let mut text = String::new();
    if let Some(options) = multipath.path_options(0) {
        let _ = write!(text, "{}", options.session.subnqn);
    }
    for path in 0..multipath.paths() {
        let (state, ana) = (state_name(multipath.state(path)), state_of(multipath.ana(path)));
        let _ = write!(text, "; {} {state}{ana}", name(multipath, path));
    }
    text
}

pub(crate) fn state_name(state: PathState) -> &'static str {
    match state {
        PathState::Connecting => "connecting",
        PathState::Live => "live",
        PathState::Resetting { .. } => "down",
        PathState::Lost => "given up",
    }
}

/// What happens to requests, if they are not carried out.
fn meanwhile(multipath: &Multipath) -> &'static str {
    match multipath.request_outcome(Instant::now()) {
        RequestOutcome::CarriedOut => "",
        RequestOutcome::Fail => "; requests fail",
        RequestOutcome::Wait => "; requests wait",
    }
}

fn name(multipath: &Multipath, path: usize) -> String {
    let to = multipath.path_options(path).map(|options| options.session.to.to_string());
    format!("path {}", to.unwrap_or_default())
}

fn state_of(ana: Option<AnaState>) -> String {
    ana.map(|state| format!(", {}", text(state))).unwrap_or_default()
}

pub(crate) fn text(state: AnaState) -> &'static str {
    state.name().unwrap_or("in an unknown ANA state")
}
