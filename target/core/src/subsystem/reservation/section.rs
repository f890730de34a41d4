//! The text of a persisted reservation.

use nvme::reservation::ReservationType;

use super::state::{HostId, REGISTRANTS_MAX, State};
use crate::subsystem::persistence::Section;

impl Section for State {
    const NAME: &'static str = "reservation";

    fn emit(&self) -> String {
        let mut text = format!("generation {}\ntype {}\n", self.generation, self.rtype.0);
        if let Some(holder) = &self.holder {
            text += &format!("holder {}\n", hex(holder));
        }
        for (host, key) in &self.registrants {
            text += &format!("registrant {} {key:016x}\n", hex(host));
        }
        text
    }

    fn parse(body: &str) -> Option<State> {
        let mut state = State { persists: true, ..State::default() };
        for line in body.lines() {
            let (word, rest) = line.split_once(' ')?;
            match word {
                "generation" => state.generation = rest.parse().ok()?,
                "type" => state.rtype = ReservationType(rest.parse().ok()?),
                "holder" => state.holder = Some(host(rest)?),
                "registrant" => {
                    let (id, key) = rest.split_once(' ')?;
                    state.registrants.insert(host(id)?, u64::from_str_radix(key, 16).ok()?);
                }
                _ => return None,
            }
        }
        // A state that requests cannot produce is invalid.
        is_possible(&state).then_some(state)
    }
}

fn is_possible(state: &State) -> bool {
    let count = state.registrants.len();
    let held = match (state.rtype, &state.holder) {
        (ReservationType::NONE, None) => true,
        (rtype, None) => rtype.is_held_by_all() && count > 0,
        (rtype, Some(holder)) => {
            let single = rtype.is_known() && !rtype.is_held_by_all();
            single && state.registrants.contains_key(holder)
        }
    };
    held && count <= REGISTRANTS_MAX && state.registrants.values().all(|key| *key != 0)
}

fn hex(host: &HostId) -> String {
    format!("{:032x}", u128::from_be_bytes(*host))
}

fn host(text: &str) -> Option<HostId> {
    u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes)
}
