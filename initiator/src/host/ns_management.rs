//! Namespace Management, Namespace Attachment and Format NVM.

use nvme::identify::{Cns, Csi, Identify, NAMESPACES_PER_PAGE, emit_controllers, namespaces};
use nvme::namespace_management::{
    AttachmentSelect, ManagementSelect, NamespaceAttachment, NamespaceManagement, NewNamespace,
};
use nvme::{AdminOpcode, PAGE_BYTES, Sgl, Sqe};

use super::{Error, Host};
use crate::session::Data;

impl Host {
    /// Creates a namespace that is attached to no controller. Returns its id.
    ///
    /// # Errors
    /// The status, or the end of the association.
    pub fn create_namespace(&mut self, new: &NewNamespace, csi: Csi) -> Result<u32, Error> {
        let mut page = Box::new([0; PAGE_BYTES]);
        new.emit(&mut page);
        let order = NamespaceManagement { csi, ..NamespaceManagement::default() };
        let sqe = order.emit(Sgl::NONE);
        let result = self.command_out(0, "Namespace Management", sqe, page.as_slice())?;
        Ok(result as u32)
    }

    /// Deletes a namespace; [`nvme::NSID_ALL`]: all that can be deleted.
    ///
    /// # Errors
    /// As above.
    pub fn delete_namespace(&mut self, nsid: u32) -> Result<(), Error> {
        let sel = ManagementSelect::DELETE;
        let order = NamespaceManagement { sel, nsid, csi: Csi::NVM };
        self.command(0, "Namespace Management", order.emit(Sgl::NONE), Data::None)?;
        Ok(())
    }

    /// Attaches a namespace to controllers, whose ids ascend, or detaches it.
    ///
    /// # Errors
    /// As above.
    pub fn attach_namespace(
        &mut self,
        sel: AttachmentSelect,
        nsid: u32,
        cntlids: &[u16],
    ) -> Result<(), Error> {
        let mut page = Box::new([0; PAGE_BYTES]);
        emit_controllers(&mut page, 0, cntlids.iter().copied());
        let sqe = NamespaceAttachment { sel, nsid }.emit(Sgl::NONE);
        self.command_out(0, "Namespace Attachment", sqe, page.as_slice())?;
        Ok(())
    }

    /// Formats a namespace: `format` is the index of an LBA format, `erase` a secure erase setting
    /// (0 none, 1 user data, 2 cryptographic).
    ///
    /// # Errors
    /// As above.
    pub fn format(&mut self, nsid: u32, format: u8, erase: u8) -> Result<(), Error> {
        let (low, high) = (u32::from(format & 0xF), u32::from(format >> 4 & 3));
        let cdw10 = low | u32::from(erase & 7) << 9 | high << 12;
        let sqe = Sqe { nsid, cdw10, ..Sqe::admin(AdminOpcode::FORMAT_NVM) };
        self.command(0, "Format NVM", sqe, Data::None)?;
        Ok(())
    }

    /// Returns one page of the ids of all allocated namespaces above `after`, attached or not.
    ///
    /// # Errors
    /// As above.
    pub fn allocated_namespaces(&mut self, after: u32) -> Result<Vec<u32>, Error> {
        let page = self.identify(Identify::new(Cns::ALLOCATED_NAMESPACES, after))?;
        Ok(namespaces(&page).take(NAMESPACES_PER_PAGE).collect())
    }
}
