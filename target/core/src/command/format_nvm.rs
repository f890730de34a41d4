//! Format NVM: erases a namespace where the configuration allows it (`allow_format`), and changes
//! its block size on request.
//!
//! Source: NVMe Base Specification 2.0, "Format NVM command". Whether a secure erase was requested or not,
//! all blocks are deallocated and read as zeros afterwards, durably, before the completion. The medium below
//! may keep their data: no cryptographic erase is promised. From its beginning to its end, I/O is rejected
//! (`provision/format_task.rs`).

use nvme::{NSID_ALL, Sqe, Status};

use super::{Plan, no_data};
use crate::controller::Controller;
use crate::subsystem::Namespace;
use crate::subsystem::ns_request::{CreatedNsid, FormatRequest, NamespaceRequest};
use crate::subsystem::reservation::Barred;

/// A format applies to a single namespace, never to all of a subsystem (FNA bit 3), and erases
/// without cryptography (bit 2 is 0).
pub(crate) const FNA: u8 = 1 << 3;

/// The bit of OACS.
pub(super) const OACS: u16 = 1 << 1;

/// Decides on a Format NVM command.
///
/// # Errors
/// Invalid Command Opcode if no namespace may be formatted; otherwise the error of the command.
pub(super) fn plan(sqe: &Sqe, controller: &Controller) -> Result<Plan, Status> {
    let subsystem = controller.subsystem().filter(|subsystem| subsystem.allows_format());
    let subsystem = subsystem.ok_or(Status::INVALID_OPCODE.with_dnr())?;
    let [format, others, erase] =
        [sqe.cdw10 & 0xF | sqe.cdw10 >> 8 & 0x30, sqe.cdw10 >> 4 & 0x1F, sqe.cdw10 >> 9 & 7];
    // 0: none, 1: user data.
    if sqe.nsid == NSID_ALL || erase > 1 {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    let namespace = subsystem.namespace(sqe.nsid)?;
    controller.association.reach.check(namespace.ana_group)?;
    let shift = u8::try_from(format).ok().and_then(|index| namespace.formats.shift(index));
    // Metadata and protection information are not supported.
    let shift = shift.filter(|_| others == 0).ok_or(Status::INVALID_FORMAT.with_dnr())?;
    if !namespace.allow_format {
        return Err(Status::OPERATION_DENIED.with_dnr());
    }
    controller.association.reservations.barred(sqe.nsid).check(Barred::WRITE)?;
    if namespace.is_read_only() {
        return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
    }
    if namespace.formatting.is_some() {
        return Err(Status::FORMAT_IN_PROGRESS);
    }
    no_data(sqe)?;
    let (cntlid, host_id) = (controller.association.cntlid, controller.association.host_id);
    let request = FormatRequest { nsid: sqe.nsid, block_size_bytes: 1 << shift, cntlid, host_id };
    Ok(Plan::Order { what: NamespaceRequest::Format(request), made: CreatedNsid::default() })
}

/// Returns FPI: progress is supported, and the percentage of a format that is left.
pub(super) fn fpi(namespace: &Namespace) -> u8 {
    const SUPPORTED: u8 = 1 << 7;
    match (&namespace.formatting, namespace.allow_format) {
        (Some(progress), _) => SUPPORTED | progress.left_percent(),
        (None, true) => SUPPORTED,
        (None, false) => 0,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nvme::AdminOpcode;
    use nvme::identify::{Cns, Identify, IdentifyController, IdentifyNamespace};
    use nvme::log::AnaState;

    use crate::command::admin::tests::{ask, given, keyed, nvm};
    use crate::command::format_nvm::*;
    use crate::subsystem::Subsystem;
    use crate::subsystem::ana::AnaStates;
    use crate::subsystem::lba_format::Progress;
    use crate::subsystem::testing::sample;
    use nvmfd_blockdev::BlockSizes;

    /// Namespace 2 may be formatted, 1 may not; 7 may, and is write protected.
    fn granted() -> Controller {
        let mut subsystem = sample();
        subsystem.namespaces[1].allow_format = true;
        subsystem.namespaces[2].allow_format = true;
        subsystem.namespaces[2].read_only = true;
        let mut controller = nvm();
        controller.replace_subsystem(Arc::new(subsystem));
        controller
    }

    fn format(nsid: u32, cdw10: u32) -> Sqe {
        Sqe { cdw10, ..Sqe::admin(AdminOpcode::FORMAT_NVM).with_nsid(nsid) }
    }

    fn refusal(sqe: &Sqe, controller: &mut Controller) -> (u16, bool) {
        let status = ask(*sqe, controller).unwrap_err();
        (status.code(), status.dnr())
    }

    fn requested(sqe: Sqe, controller: &mut Controller) -> FormatRequest {
        match ask(sqe, controller) {
            Ok(Plan::Order { what: NamespaceRequest::Format(request), .. }) => request,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn an_allowed_format_command_becomes_a_format_request() {
        for erase in [0, 1] {
            let mut controller = granted();
            let request = requested(format(2, erase << 9), &mut controller);
            let host_id = controller.association.host_id;
            assert_eq!(
                request,
                FormatRequest { nsid: 2, block_size_bytes: 512, cntlid: 5, host_id }
            );
        }
    }

    #[test]
    fn lba_formats_and_progress_are_reported_and_selectable() {
        let mut controller = granted();
        let mut subsystem = Subsystem::clone(controller.subsystem().unwrap());
        subsystem.namespaces[1].formats = BlockSizes::those(|_| true);
        controller.replace_subsystem(Arc::new(subsystem.clone()));
        for (index, block_size_bytes) in [(0, 512), (1, 4096)] {
            let request = requested(format(2, index), &mut controller);
            assert_eq!(request.block_size_bytes, block_size_bytes);
        }
        assert_eq!(refusal(&format(2, 2), &mut controller), (0x10A, true));
        let told = |nsid, controller: &mut Controller| {
            let identify = Identify::new(Cns::NAMESPACE, nsid).emit(keyed(4096));
            let page = given(ask(identify, controller)).try_into().unwrap();
            let page = IdentifyNamespace::parse(&page);
            let sizes = page.lbaf.map(|format| format.lbads);
            (page.nlbaf_z, page.flbas, page.fpi, sizes[0], sizes[1])
        };
        assert_eq!(told(2, &mut controller), (1, 0, 0x80, 9, 12));
        assert_eq!(told(1, &mut controller), (0, 0, 0, 12, 0), "hosts may not");
        subsystem.namespaces[1].block_shift = 12;
        let progress = Progress::none();
        progress.set(3, 4);
        subsystem.namespaces[1].formatting = Some(Arc::new(progress));
        controller.replace_subsystem(Arc::new(subsystem));
        assert_eq!(told(2, &mut controller), (1, 1, 0x80 | 25, 9, 12));
        assert_eq!(refusal(&format(2, 0), &mut controller), (0x084, false), "one at a time");
    }

    #[test]
    fn format_nvm_is_disabled_unless_configured() {
        assert_eq!(refusal(&format(2, 0), &mut nvm()), (0x001, true));
        assert_eq!(refusal(&format(1, 0), &mut granted()), (0x015, true));
        for (mut controller, oacs, fna) in [(nvm(), 0, 0), (granted(), 2, 8)] {
            let identify = Identify::new(Cns::CONTROLLER, 0).emit(keyed(4096));
            let page = given(ask(identify, &mut controller)).try_into().unwrap();
            let found = IdentifyController::parse(&page);
            assert_eq!((found.oacs & OACS, found.fna), (oacs, fna));
        }
    }

    #[test]
    fn unsupported_format_commands_are_refused_with_their_status() {
        let cryptographic = 2 << 9;
        for (what, sqe, code) in [
            ("all namespaces", format(u32::MAX, 0), 0x002),
            ("cryptographic erase", format(2, cryptographic), 0x002),
            ("another format", format(2, 1), 0x10A),
            ("a format of the upper half", format(2, 1 << 12), 0x10A),
            ("metadata within the blocks", format(2, 1 << 4), 0x10A),
            ("protection information", format(2, 1 << 5), 0x10A),
            ("no such namespace", format(3, 0), 0x00B),
            ("read only", format(7, 0), 0x020),
            ("data", format(2, 0).with_sgl(keyed(4096)), 0x00F),
        ] {
            assert_eq!(refusal(&sqe, &mut granted()), (code, true), "{what}");
        }
        let mut controller = granted();
        controller.association.reservations.set_barred(2, Barred::WRITE);
        assert_eq!(refusal(&format(2, 0), &mut controller), (0x083, true));
        let controller = &mut granted();
        controller.association.reach.set(&AnaStates::all(AnaState::INACCESSIBLE));
        assert_eq!(refusal(&format(2, 0), controller), (0x302, false));
    }
}
