//! Choices derived from bytes: a changed byte changes one choice. After the end all are 0.

/// The remaining bytes.
pub(super) struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Bytes<'a> {
        Bytes(bytes)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next `len` bytes, or the remaining ones.
    pub(super) fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// The next `N` bytes, padded with zeros.
    pub(super) fn array<const N: usize>(&mut self) -> [u8; N] {
        let taken = self.take(N);
        std::array::from_fn(|at| taken.get(at).copied().unwrap_or(0))
    }

    pub(super) fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.array())
    }

    pub(super) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    pub(super) fn bool(&mut self) -> bool {
        self.u8() & 1 == 1
    }

    /// One of several values.
    pub(super) fn of<T: Copy>(&mut self, things: &[T]) -> T {
        things[usize::from(self.u8()) % things.len()]
    }

    /// Changes some bytes of `target`, each by a position and a value.
    pub(super) fn patch(&mut self, target: &mut [u8]) {
        for _ in 0..self.u8() % 8 {
            let (at, value) = (usize::from(self.u16()), self.u8());
            if !target.is_empty() {
                target[at % target.len()] = value;
            }
        }
    }
}
