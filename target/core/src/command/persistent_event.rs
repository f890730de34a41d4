//! The Persistent Event log: reporting contexts and access.
//!
//! Source: NVMe Base Specification 2.0, "Persistent Event Log (Log Identifier 0Dh)". A controller
//! has one reporting context; it ends with a release, with a reset, and with the controller.

use nvme::log::GetLogPage;
use nvme::persistent_event::Action;
use nvme::{Sqe, Status};

use super::admin::AdminContext;
use super::log_page::piece;
use super::{Plan, destination};
use crate::controller::Controller;
use crate::subsystem::event_log::LogHeader;

/// Decides on a Get Log Page command for it.
///
/// # Errors
/// Invalid Log Page if no log is kept; Command Sequence Error if a context exists when one is
/// established, or does not when it is read; and errors of the command.
pub(super) fn plan(
    sqe: &Sqe,
    get: &GetLogPage,
    controller: &mut Controller,
    env: &AdminContext<'_>,
) -> Result<Plan, Status> {
    let unknown = Status::INVALID_LOG_PAGE.with_dnr();
    let subsystem = controller.subsystem().ok_or(unknown)?;
    let history = subsystem.usage.history().ok_or(unknown)?;
    let sequence = Status::COMMAND_SEQUENCE_ERROR.with_dnr();
    let context = match Action(get.lsp & 3) {
        Action::READ => controller.reporting.clone().ok_or(sequence)?,
        Action::ESTABLISH if controller.reporting.is_some() => return Err(sequence),
        Action::ESTABLISH => {
            let (nqn, serial, model) = (subsystem.nqn, subsystem.serial, subsystem.model);
            history.report(&LogHeader { nqn, serial, model }, &env.power)
        }
        Action::RELEASE => {
            // It has no data, even if a buffer is given; and a context need not exist.
            controller.reporting = None;
            return Ok(Plan::Reply(0));
        }
        _ => return Err(Status::INVALID_FIELD.with_dnr()),
    };
    let page = piece(get, &context, env.received.mdts_bytes)?;
    // A length that is checked against MDTS (32 bits) fits in 32 bits.
    let to = destination(sqe, env.received, get.len_bytes() as u32, false)?;
    controller.reporting = Some(context);
    Ok(Plan::Give { page, to })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::sync_channel;

    use nvme::identify::{Cns, Identify, IdentifyController};
    use nvme::log::{LogId, SupportedPages};
    use nvme::persistent_event::PersistentEventHeader;
    use nvme::{PAGE_BYTES, Text};

    use crate::command::admin::tests::{MDTS, ask, given, keyed, nvm, refused};
    use crate::command::persistent_event::*;
    use crate::subsystem::Subsystem;
    use crate::subsystem::event_log::{PersistentEvent, PersistentEventLog};
    use crate::subsystem::power::Power;
    use crate::subsystem::usage::Usage;

    const BYTES: u32 = PersistentEventHeader::BYTES as u32;

    /// A controller of a subsystem whose events are kept.
    fn kept() -> (Controller, Arc<Usage>) {
        let mut controller = nvm();
        let subsystem = Subsystem::clone(controller.subsystem().unwrap());
        let history = PersistentEventLog::new(subsystem.nqn, None, sync_channel(1).0);
        let usage = Arc::new(Usage::kept(history));
        let subsystem = Subsystem { usage: Arc::clone(&usage), ..subsystem };
        controller.replace_subsystem(Arc::new(subsystem));
        (controller, usage)
    }

    fn log(action: Action, lpo: u64, bytes: u32) -> Sqe {
        let get = GetLogPage::new(LogId::PERSISTENT_EVENT, lpo, bytes / 4);
        GetLogPage { lsp: action.0, ..get }.emit(keyed(bytes))
    }

    fn events(page: &[u8]) -> u32 {
        PersistentEventHeader::parse(page.first_chunk().unwrap()).events
    }

    #[test]
    fn a_context_is_established_read_and_released_in_this_order() {
        let (mut controller, usage) = kept();
        let sequence = 0x00C;
        assert_eq!(refused(ask(log(Action::READ, 0, BYTES), &mut controller)), sequence);
        let release = log(Action::RELEASE, 0, BYTES);
        assert_eq!(ask(release, &mut controller), Ok(Plan::Reply(0)), "there need not be one");

        let header = given(ask(log(Action::ESTABLISH, 0, BYTES), &mut controller));
        assert_eq!((header.len(), events(&header)), (512, 0));
        let note = PersistentEvent::PowerOnOrReset { firmware: Text::lossy("1"), cntlid: 3 };
        usage.history().unwrap().note(note, &Power::default());
        assert_eq!(refused(ask(log(Action::ESTABLISH, 0, BYTES), &mut controller)), sequence);
        let again = given(ask(log(Action::READ, 0, BYTES), &mut controller));
        assert_eq!(again, header, "it says the same until it is released");
        assert_eq!(ask(release, &mut controller), Ok(Plan::Reply(0)));
        assert_eq!(refused(ask(log(Action::READ, 0, BYTES), &mut controller)), sequence);

        let whole = given(ask(log(Action::ESTABLISH, 0, 1024), &mut controller));
        assert_eq!(events(&whole), 1);
        let len = PersistentEventHeader::parse(whole.first_chunk().unwrap()).total_bytes as usize;
        let mut pieces = Vec::new();
        for at in (0..len as u64).step_by(64) {
            pieces.extend(given(ask(log(Action::READ, at, 64), &mut controller)));
        }
        assert_eq!(pieces[..len], whole[..len], "in pieces");
        // A reset ends it as well.
        for cc in [0, 0x46_0001] {
            controller.set_property(nvme::property::Property::CC, Some(4), cc).unwrap();
        }
        assert_eq!(refused(ask(log(Action::READ, 0, BYTES), &mut controller)), sequence);
    }

    #[test]
    fn a_failed_command_establishes_no_context() {
        let (mut controller, ..) = kept();
        let long = GetLogPage::new(LogId::PERSISTENT_EVENT, 0, 128);
        let table = [
            ("an unknown action", log(Action(3), 0, BYTES), 0x002),
            ("an offset of 2", log(Action::ESTABLISH, 2, BYTES), 0x002),
            ("beyond the end", log(Action::ESTABLISH, 516, BYTES), 0x002),
            ("more than MDTS", log(Action::ESTABLISH, 0, MDTS + 4), 0x002),
            ("a short buffer", GetLogPage { lsp: 1, ..long }.emit(keyed(508)), 0x00F),
        ];
        for (what, sqe, code) in table {
            assert_eq!(refused(ask(sqe, &mut controller)), code, "{what}");
            let read = ask(log(Action::READ, 0, BYTES), &mut controller);
            assert_eq!(refused(read), 0x00C, "{what}: there is no context");
        }
    }

    #[test]
    fn the_persistent_event_log_is_unsupported_without_persistence() {
        let about = |controller: &mut Controller| {
            let identify = Identify::new(Cns::CONTROLLER, 0).emit(keyed(4096));
            let page: Box<[u8; PAGE_BYTES]> = given(ask(identify, controller)).try_into().unwrap();
            let found = IdentifyController::parse(&page);
            let supported = GetLogPage::new(LogId::SUPPORTED_PAGES, 0, 256).emit(keyed(1024));
            let page = given(ask(supported, controller)).try_into().unwrap();
            let log = SupportedPages::parse(&page).pages[0x0D].supported();
            (found.lpa.persistent_event(), found.pels_64k, log)
        };
        let (mut kept, ..) = kept();
        assert_eq!(about(&mut kept), (true, 1, true));
        assert_eq!(about(&mut nvm()), (false, 0, false));
        for action in 0..4 {
            let sqe = log(Action(action), 0, BYTES);
            assert_eq!(refused(ask(sqe, &mut nvm())), 0x109);
        }
    }
}
