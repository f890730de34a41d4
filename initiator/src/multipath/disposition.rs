//! What follows from the status of a command: the rules of Linux (`nvme_decide_disposition`).

use std::time::Duration;

use nvme::Status;

/// Maximum number of repetitions after a status, as in Linux (`nvme_max_retries`).
const MOST_REPEATS: u8 = 5;

/// What happens to a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Disposition {
    /// It is done, with this status.
    Done,
    /// It is repeated on any path after a delay, and that is counted.
    Repeat(Duration),
    /// It is repeated on another path. If so: this path is not used until its ANA log is read.
    Failover {
        /// The status is one of asymmetric namespace access.
        ana: bool,
    },
    /// The path has to authenticate again; the request is repeated.
    Reset,
}

/// Decides by the status, the number of repetitions, and the controller's command retry delays.
pub(super) fn dispose(status: Status, repeats: u8, delays_100ms: [u16; 3]) -> Disposition {
    if status.is_success() || status.dnr() {
        return Disposition::Done;
    }
    if status.is(Status::AUTHENTICATION_REQUIRED) {
        return Disposition::Reset;
    }
    let ana = [Status::ANA_PERSISTENT_LOSS, Status::ANA_INACCESSIBLE, Status::ANA_TRANSITION];
    match status.sct() {
        3 => Disposition::Failover { ana: ana.iter().any(|code| status.is(*code)) },
        _ if repeats >= MOST_REPEATS => Disposition::Done,
        _ => {
            let delay = usize::from(status.crd()).checked_sub(1).map_or(0, |n| delays_100ms[n]);
            Disposition::Repeat(Duration::from_millis(100) * u32::from(delay))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_retried_by_status_as_in_linux() {
        let of = |status| dispose(status, 0, [3, 5, 7]);
        let now = Disposition::Repeat(Duration::ZERO);
        let failover = |ana| Disposition::Failover { ana };
        for (status, expected) in [
            (Status::SUCCESS, Disposition::Done),
            (Status::INTERNAL_ERROR, now),
            (Status::INTERNAL_ERROR.with_dnr(), Disposition::Done),
            (
                Status::NAMESPACE_NOT_READY.with_crd(3),
                Disposition::Repeat(Duration::from_millis(700)),
            ),
            (Status::NAMESPACE_NOT_READY.with_crd(3).with_dnr(), Disposition::Done),
            (Status::ANA_INACCESSIBLE, failover(true)),
            (Status::ANA_PERSISTENT_LOSS, failover(true)),
            (Status::ANA_TRANSITION.with_crd(1), failover(true)),
            // Do Not Retry is tested first, also for path errors.
            (Status::ANA_INACCESSIBLE.with_dnr(), Disposition::Done),
            (Status::INTERNAL_PATH_ERROR, failover(false)),
            (Status::HOST_PATH_ERROR, failover(false)),
            (Status::AUTHENTICATION_REQUIRED, Disposition::Reset),
            (Status::AUTHENTICATION_REQUIRED.with_dnr(), Disposition::Done),
        ] {
            assert_eq!(of(status), expected, "{status}");
        }
        let fifth = |repeats| dispose(Status::INTERNAL_ERROR, repeats, [0; 3]);
        assert_eq!((fifth(4), fifth(5)), (now, Disposition::Done));
        // A path error is no failure of the command: it is not counted.
        assert_eq!(dispose(Status::ANA_INACCESSIBLE, 5, [0; 3]), failover(true));
    }
}
