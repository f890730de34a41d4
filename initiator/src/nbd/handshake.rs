//! The handshake: options and their replies.

/// "NBDMAGIC".
const INIT_MAGIC: [u8; 8] = *b"NBDMAGIC";
/// "IHAVEOPT": before the server's flags, and before each option.
const OPTION_MAGIC: [u8; 8] = *b"IHAVEOPT";
const REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Handshake flags of the server: fixed newstyle, no zeroes after the reply to an export name.
const SERVER_FLAGS: u16 = 3;
const CLIENT_FIXED: u32 = 1;
const CLIENT_NO_ZEROES: u32 = 2;

/// Data of an option at most: a name of 4096 bytes, and what goes with it.
const MOST_OPTION_BYTES: u32 = 16 << 10;
/// Bytes before the data of an option.
const OPTION_HEAD: usize = 16;

mod option {
    pub(super) const EXPORT_NAME: u32 = 1;
    pub(super) const ABORT: u32 = 2;
    pub(super) const LIST: u32 = 3;
    pub(super) const INFO: u32 = 6;
    pub(super) const GO: u32 = 7;
    pub(super) const STRUCTURED_REPLY: u32 = 8;
    pub(super) const LIST_META_CONTEXT: u32 = 9;
    pub(super) const SET_META_CONTEXT: u32 = 10;
}

mod reply {
    pub(super) const ACK: u32 = 1;
    pub(super) const SERVER: u32 = 2;
    pub(super) const INFO: u32 = 3;
    pub(super) const META_CONTEXT: u32 = 4;
    pub(super) const ERR_UNSUP: u32 = 1 << 31 | 1;
    pub(super) const ERR_INVALID: u32 = 1 << 31 | 3;
    pub(super) const ERR_UNKNOWN: u32 = 1 << 31 | 6;
}

mod info {
    pub(super) const EXPORT: u16 = 0;
    pub(super) const NAME: u16 = 1;
    pub(super) const DESCRIPTION: u16 = 2;
    pub(super) const BLOCK_SIZE: u16 = 3;
}

/// The only context: which blocks are allocated, and which are zero.
const BASE_ALLOCATION: &str = "base:allocation";
/// Its id, as in block status replies.
const BASE_ALLOCATION_ID: u32 = 1;

/// What is exported, under the empty name and under `name`.
#[derive(Clone, Debug, Default)]
pub struct Export {
    /// Its name.
    pub name: String,
    /// For people.
    pub description: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Transmission flags: [`flag`](super::flag).
    pub flags: u16,
    /// Offsets and lengths are multiples of it.
    pub block_bytes: u32,
    /// Preferred length.
    pub preferred_bytes: u32,
    /// Longest length of reads and writes.
    pub most_bytes: u32,
}

/// What the client has negotiated.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Negotiated {
    /// Replies to reads are structured.
    pub structured: bool,
    /// Block status is asked for.
    pub base_allocation: bool,
}

/// Result of [`Handshake::advance`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Progress {
    /// More bytes are needed.
    More,
    /// The next byte belongs to a request.
    Transmission(Negotiated),
    /// The connection ends when the replies are sent.
    End,
}

/// State of a handshake.
#[derive(Debug, Default)]
pub struct Handshake {
    has_client_flags: bool,
    no_zeroes: bool,
    negotiated: Negotiated,
}

impl Handshake {
    /// What the server sends first.
    pub fn greeting() -> [u8; 18] {
        let mut bytes = [0; 18];
        bytes[..8].copy_from_slice(&INIT_MAGIC);
        bytes[8..16].copy_from_slice(&OPTION_MAGIC);
        bytes[16..].copy_from_slice(&SERVER_FLAGS.to_be_bytes());
        bytes
    }

    /// Reads one message of the client, if it is there as a whole, and appends the reply to `out`.
    /// Returns the bytes that were read. The caller calls again until none are.
    pub fn advance(
        &mut self,
        input: &[u8],
        export: &Export,
        out: &mut Vec<u8>,
    ) -> (usize, Progress) {
        if !self.has_client_flags {
            let Some(flags) = input.first_chunk() else { return (0, Progress::More) };
            let flags = u32::from_be_bytes(*flags);
            if flags & CLIENT_FIXED == 0 || flags & !(CLIENT_FIXED | CLIENT_NO_ZEROES) != 0 {
                return (4, Progress::End);
            }
            (self.has_client_flags, self.no_zeroes) = (true, flags & CLIENT_NO_ZEROES != 0);
            return (4, Progress::More);
        }
        let Some(head) = input.first_chunk::<OPTION_HEAD>() else { return (0, Progress::More) };
        let mut fields = Fields(&head[8..]);
        let (option, len) = (fields.u32().unwrap_or(0), fields.u32().unwrap_or(0));
        if head[..8] != OPTION_MAGIC || len > MOST_OPTION_BYTES {
            return (OPTION_HEAD, Progress::End);
        }
        let total = OPTION_HEAD + len as usize;
        let Some(data) = input.get(OPTION_HEAD..total) else { return (0, Progress::More) };
        (total, self.on_option(option, data, export, out))
    }

    fn on_option(
        &mut self,
        option: u32,
        data: &[u8],
        export: &Export,
        out: &mut Vec<u8>,
    ) -> Progress {
        match option {
            option::EXPORT_NAME => return self.on_export_name(data, export, out),
            option::ABORT => {
                send(out, option, reply::ACK, &[]);
                return Progress::End;
            }
            option::LIST if data.is_empty() => {
                // The default export: its name is empty.
                let entry = [&0u32.to_be_bytes(), export.description.as_bytes()].concat();
                send(out, option, reply::SERVER, &entry);
                send(out, option, reply::ACK, &[]);
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.negotiated.structured = true;
                send(out, option, reply::ACK, &[]);
            }
            option::LIST | option::STRUCTURED_REPLY => send(out, option, reply::ERR_INVALID, &[]),
            option::INFO | option::GO => match self.on_go(option, data, export, out) {
                Ok(()) if option == option::GO => return Progress::Transmission(self.negotiated),
                Ok(()) => {}
                Err(error) => send(out, option, error, &[]),
            },
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                if let Err(error) = self.on_meta_context(option, data, export, out) {
                    send(out, option, error, &[]);
                }
            }
            // Among them TLS and extended headers.
            _ => send(out, option, reply::ERR_UNSUP, &[]),
        }
        Progress::More
    }

    /// The oldest way to start: there is no reply to an unknown name but the end.
    fn on_export_name(&mut self, data: &[u8], export: &Export, out: &mut Vec<u8>) -> Progress {
        if !export.is_named(data) {
            return Progress::End;
        }
        out.extend(export.size_bytes.to_be_bytes());
        out.extend(export.flags.to_be_bytes());
        if !self.no_zeroes {
            out.extend([0; 124]);
        }
        Progress::Transmission(self.negotiated)
    }

    fn on_go(
        &self,
        option: u32,
        data: &[u8],
        export: &Export,
        out: &mut Vec<u8>,
    ) -> Result<(), u32> {
        let mut fields = Fields(data);
        let (name, wanted) = (|| {
            let name = fields.string()?;
            let count = fields.u16()?;
            (fields.0.len() == usize::from(count) * 2).then_some((name, fields.0))
        })()
        .ok_or(reply::ERR_INVALID)?;
        if !export.is_named(name) {
            return Err(reply::ERR_UNKNOWN);
        }
        let mut reply = |kind: u16, data: &[&[u8]]| {
            let data = [&kind.to_be_bytes()[..], &data.concat()].concat();
            send(out, option, reply::INFO, &data);
        };
        reply(info::EXPORT, &[&export.size_bytes.to_be_bytes(), &export.flags.to_be_bytes()]);
        // Also told to a client that has not asked: it may be one that only did not think of it.
        let sizes = [export.block_bytes, export.preferred_bytes, export.most_bytes];
        reply(info::BLOCK_SIZE, &sizes.map(u32::to_be_bytes).each_ref().map(|b| &b[..]));
        for kind in wanted.chunks_exact(2).map(|kind| u16::from_be_bytes([kind[0], kind[1]])) {
            match kind {
                info::NAME => reply(kind, &[name]),
                info::DESCRIPTION => reply(kind, &[export.description.as_bytes()]),
                _ => {}
            }
        }
        send(out, option, reply::ACK, &[]);
        Ok(())
    }

    fn on_meta_context(
        &mut self,
        option: u32,
        data: &[u8],
        export: &Export,
        out: &mut Vec<u8>,
    ) -> Result<(), u32> {
        let is_set = option == option::SET_META_CONTEXT;
        if is_set {
            self.negotiated.base_allocation = false;
            if !self.negotiated.structured {
                return Err(reply::ERR_INVALID);
            }
        }
        let mut fields = Fields(data);
        let name = fields.string().ok_or(reply::ERR_INVALID)?;
        let count = fields.u32().ok_or(reply::ERR_INVALID)?;
        let mut matches = count == 0 && !is_set;
        for _ in 0..count {
            let query = fields.string().ok_or(reply::ERR_INVALID)?;
            matches |= query == BASE_ALLOCATION.as_bytes() || !is_set && query == b"base:";
        }
        if !fields.0.is_empty() {
            return Err(reply::ERR_INVALID);
        }
        if !export.is_named(name) {
            return Err(reply::ERR_UNKNOWN);
        }
        if matches {
            let id = if is_set { BASE_ALLOCATION_ID } else { 0 };
            let context = [&id.to_be_bytes(), BASE_ALLOCATION.as_bytes()].concat();
            send(out, option, reply::META_CONTEXT, &context);
            self.negotiated.base_allocation |= is_set;
        }
        send(out, option, reply::ACK, &[]);
        Ok(())
    }
}

impl Export {
    fn is_named(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}

fn send(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    out.extend(REPLY_MAGIC.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
}

/// Fields of an option, in order.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.bytes(2)?.try_into().ok().map(u16::from_be_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes(4)?.try_into().ok().map(u32::from_be_bytes)
    }

    /// A length and so many bytes.
    fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(usize::try_from(len).ok()?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn export() -> Export {
        Export {
            name: "disk".into(),
            description: "a disk".into(),
            size_bytes: 1 << 30,
            flags: 0x16D,
            block_bytes: 4096,
            preferred_bytes: 4096,
            most_bytes: 32 << 20,
        }
    }

    fn option(option: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = OPTION_MAGIC.to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
    }

    fn go(name: &str, infos: &[u16]) -> Vec<u8> {
        let mut data = string(name);
        data.extend((infos.len() as u16).to_be_bytes());
        infos.iter().for_each(|info| data.extend(info.to_be_bytes()));
        option(option::GO, &data)
    }

    fn contexts(queries: &[&str]) -> Vec<u8> {
        let mut data = string("");
        data.extend((queries.len() as u32).to_be_bytes());
        queries.iter().for_each(|query| data.extend(string(query)));
        option(option::SET_META_CONTEXT, &data)
    }

    /// All messages after the client's flags: replies (kind, data), and how it ends.
    fn talk(messages: &[Vec<u8>]) -> (Vec<(u32, Vec<u8>)>, Progress) {
        let (mut handshake, mut out) = (Handshake::default(), Vec::new());
        let mut input = 3u32.to_be_bytes().to_vec();
        messages.iter().for_each(|message| input.extend(message));
        let (mut at, mut progress) = (0, Progress::More);
        while progress == Progress::More {
            let (read, now) = handshake.advance(&input[at..], &export(), &mut out);
            (at, progress) = (at + read, now);
            if read == 0 {
                break;
            }
        }
        let (mut replies, mut rest) = (Vec::new(), &out[..]);
        while let Some((head, tail)) = rest.split_first_chunk::<20>() {
            assert_eq!(head[..8], REPLY_MAGIC.to_be_bytes());
            let mut fields = Fields(&head[12..]);
            let (kind, len) = (fields.u32().expect("kind"), fields.u32().expect("length"));
            replies.push((kind, tail[..len as usize].to_vec()));
            rest = &tail[len as usize..];
        }
        (replies, progress)
    }

    #[test]
    fn info_replies_contain_size_flags_and_block_sizes() {
        let structured = option(option::STRUCTURED_REPLY, &[]);
        let (replies, progress) =
            talk(&[structured, contexts(&["base:allocation", "qemu:x"]), go("", &[1, 2, 3, 99])]);
        let negotiated = Negotiated { structured: true, base_allocation: true };
        assert_eq!(progress, Progress::Transmission(negotiated));
        let kinds: Vec<u32> = replies.iter().map(|(kind, _)| *kind).collect();
        assert_eq!(kinds, [1, 4, 1, 3, 3, 3, 3, 1]);
        assert_eq!(replies[1].1, [&[0, 0, 0, 1][..], b"base:allocation"].concat());
        assert_eq!(replies[3].1, [0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0x01, 0x6D]);
        assert_eq!(replies[4].1, [0, 3, 0, 0, 0x10, 0, 0, 0, 0x10, 0, 2, 0, 0, 0]);
        assert_eq!(replies[5].1, [0, 1]);
        assert_eq!(replies[6].1, [&[0, 2][..], b"a disk"].concat());
        // Contexts need structured replies, and none may be asked for.
        let (replies, _) = talk(&[contexts(&["base:allocation"])]);
        assert_eq!(replies, [(reply::ERR_INVALID, vec![])]);
    }

    #[test]
    fn unknown_exports_and_options_fail_and_the_handshake_continues() {
        let (replies, progress) = talk(&[go("other", &[]), option(5, &[]), go("disk", &[])]);
        assert_eq!(progress, Progress::Transmission(Negotiated::default()));
        assert_eq!((replies[0].0, replies[1].0), (reply::ERR_UNKNOWN, reply::ERR_UNSUP));
        let (replies, progress) = talk(&[option(option::LIST, &[]), option(option::ABORT, &[])]);
        assert_eq!(replies[0].1, [&[0; 4][..], b"a disk"].concat());
        assert_eq!(progress, Progress::End);
        // Lengths that do not add up.
        let short = go("disk", &[1, 2]);
        let cut = option(option::GO, &short[16..short.len() - 1]);
        let (replies, progress) = talk(&[cut]);
        assert_eq!((replies[0].0, progress), (reply::ERR_INVALID, Progress::More));
    }

    #[test]
    fn export_name_option_is_answered_with_the_export_only() {
        for (flags, len) in [(1u32, 134), (3, 10)] {
            let (mut handshake, mut out) = (Handshake::default(), Vec::new());
            handshake.advance(&flags.to_be_bytes(), &export(), &mut out);
            let name = option(option::EXPORT_NAME, b"disk");
            let (read, progress) = handshake.advance(&name, &export(), &mut out);
            assert_eq!((read, progress), (20, Progress::Transmission(Negotiated::default())));
            assert_eq!(out.len(), len);
        }
        let (replies, progress) = talk(&[option(option::EXPORT_NAME, b"other")]);
        assert_eq!((replies, progress), (vec![], Progress::End));
    }

    #[test]
    fn protocol_violations_end_the_connection() {
        let mut long = option(option::LIST, &[]);
        long[12..16].copy_from_slice(&(MOST_OPTION_BYTES + 1).to_be_bytes());
        let mut wrong = option(option::LIST, &[]);
        wrong[0] ^= 1;
        assert_eq!(talk(&[long]).1, Progress::End);
        assert_eq!(talk(&[wrong]).1, Progress::End);
        for flags in [0u32, 2, 5] {
            let flags = flags.to_be_bytes();
            let (_, progress) = Handshake::default().advance(&flags, &export(), &mut Vec::new());
            assert_eq!(progress, Progress::End);
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic_and_replies_are_bounded(kind in 0u32..13, data: Vec<u8>, junk: Vec<u8>) {
            let _ = talk(std::slice::from_ref(&junk));
            let (mut handshake, mut out) = (Handshake::default(), Vec::new());
            handshake.advance(&3u32.to_be_bytes(), &export(), &mut out);
            let message = option(kind, &data);
            let (read, _) = handshake.advance(&message, &export(), &mut out);
            prop_assert_eq!(read, message.len());
            prop_assert!(out.len() < 256 + 8 * data.len() * export().description.len());
        }
    }
}
