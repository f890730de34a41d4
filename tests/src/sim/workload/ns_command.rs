//! Commands of hosts about host-created namespaces, and I/O on those.

use std::fmt;

use nvme::identify::{Cns, Csi, Identify, emit_controllers};
use nvme::namespace_management::{
    AttachmentSelect, ManagementSelect, NamespaceAttachment, NamespaceManagement, NewNamespace,
};
use nvme::{IoOpcode, PAGE_BYTES, Sgl, Sqe};

use crate::sim::block_stamp;
use crate::sim::oracle::ns_management::GROUP;

/// A block of a host-created namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Its id.
    pub nsid: u32,
    /// The command that created it; 0 for a missing one.
    pub birth: u32,
    /// The block.
    pub lba: u32,
    /// Its size.
    pub block_bytes: u32,
}

/// A namespace command of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NsCommand {
    /// A new namespace.
    Create {
        /// Blocks.
        blocks: u32,
        /// log2 of their size: 9 or 12.
        shift: u8,
        /// Not shared: for one host at a time.
        private: bool,
    },
    /// Deletes a namespace.
    Delete {
        /// Namespace id; FFFFFFFFh: all host-created ones.
        nsid: u32,
    },
    /// Attaches it to the host's own controller.
    Attach {
        /// Namespace id.
        nsid: u32,
        /// That controller.
        cntlid: u16,
    },
    /// Detaches it from the host's own controller.
    Detach {
        /// Namespace id.
        nsid: u32,
        /// That controller.
        cntlid: u16,
    },
    /// Allocated namespace list.
    List,
    /// Active namespace list.
    Active,
    /// Identify Namespace.
    Look {
        /// Namespace id.
        nsid: u32,
    },
    /// Writes a block with FUA.
    Put(Place),
    /// Reads a block.
    Get(Place),
}

impl NsCommand {
    /// Whether it is an admin command.
    pub fn is_admin(&self) -> bool {
        !matches!(self, NsCommand::Put(_) | NsCommand::Get(_))
    }

    /// Whether it changes namespaces or attachments.
    pub fn is_order(&self) -> bool {
        use NsCommand::{Attach, Create, Delete, Detach};
        matches!(self, Create { .. } | Delete { .. } | Attach { .. } | Detach { .. })
    }

    /// Bytes of data.
    pub fn data_bytes(&self) -> u32 {
        match self {
            NsCommand::Delete { .. } => 0,
            NsCommand::Put(place) | NsCommand::Get(place) => place.block_bytes,
            _ => PAGE_BYTES as u32,
        }
    }

    /// The submission queue entry.
    pub fn sqe(&self) -> Sqe {
        let management =
            |sel, nsid| NamespaceManagement { sel, nsid, csi: Csi::NVM }.emit(Sgl::NONE);
        let attachment = |sel, nsid| NamespaceAttachment { sel, nsid }.emit(Sgl::NONE);
        let identify = |cns, nsid| Identify::new(cns, nsid).emit(Sgl::NONE);
        let io = |opcode, place: Place| Sqe::io(opcode, place.nsid).with_range(place.lba.into(), 0);
        match *self {
            NsCommand::Create { .. } => management(ManagementSelect::CREATE, 0),
            NsCommand::Delete { nsid } => management(ManagementSelect::DELETE, nsid),
            NsCommand::Attach { nsid, .. } => attachment(AttachmentSelect::ATTACH, nsid),
            NsCommand::Detach { nsid, .. } => attachment(AttachmentSelect::DETACH, nsid),
            NsCommand::List => identify(Cns::ALLOCATED_NAMESPACES, 0),
            NsCommand::Active => identify(Cns::ACTIVE_NAMESPACES, 0),
            NsCommand::Look { nsid } => identify(Cns::ALLOCATED_NAMESPACE, nsid),
            NsCommand::Put(place) => io(IoOpcode::WRITE, place).with_fua(true),
            NsCommand::Get(place) => io(IoOpcode::READ, place),
        }
    }

    /// Fills the data of command `id`; returns false if it has none.
    pub fn fill(&self, id: u32, bytes: &mut [u8]) -> bool {
        match *self {
            NsCommand::Create { blocks, shift, private } => {
                let nsze = blocks.into();
                let nmic = u8::from(!private);
                let (flbas, anagrpid) = (u8::from(shift == 12), GROUP);
                let new =
                    NewNamespace { nsze, ncap: nsze, flbas, nmic, anagrpid, ..Default::default() };
                bytes.first_chunk_mut().into_iter().for_each(|page| new.emit(page));
            }
            NsCommand::Attach { cntlid, .. } | NsCommand::Detach { cntlid, .. } => {
                let page = bytes.first_chunk_mut().into_iter();
                page.for_each(|page| emit_controllers(page, 0, [cntlid]));
            }
            NsCommand::Put(Place { nsid, lba, .. }) => {
                block_stamp::fill(id, nsid as u8, lba, bytes)
            }
            _ => return false,
        }
        true
    }
}

impl fmt::Display for NsCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NsCommand::Create { blocks, shift, private } => {
                let private = if *private { ", private" } else { "" };
                write!(f, "create a namespace of {blocks} blocks of {}{private}", 1 << shift)
            }
            NsCommand::Delete { nsid } => write!(f, "delete namespace {nsid}"),
            NsCommand::Attach { nsid, cntlid } => write!(f, "attach namespace {nsid} to {cntlid}"),
            NsCommand::Detach { nsid, cntlid } => {
                write!(f, "detach namespace {nsid} from {cntlid}")
            }
            NsCommand::List => f.write_str("list what is allocated"),
            NsCommand::Active => f.write_str("list what is attached"),
            NsCommand::Look { nsid } => write!(f, "identify allocated namespace {nsid}"),
            NsCommand::Put(Place { nsid, birth, lba, .. }) => {
                write!(f, "write block {lba} of namespace {nsid}, made by {birth}")
            }
            NsCommand::Get(Place { nsid, birth, lba, .. }) => {
                write!(f, "read block {lba} of namespace {nsid}, made by {birth}")
            }
        }
    }
}
