//! Wishes to have operations back that the kernel has to be asked, as a state machine without I/O.

use rdma::Tag;

/// Bounded by the Abort commands of all hosts: each has at most a few outstanding.
#[derive(Debug, Default)]
pub(crate) struct Recalls(Vec<Option<Recall>>);

#[derive(Clone, Copy, Debug)]
struct Recall {
    tag: Tag,
    of: Tag,
    /// The kernel has been asked.
    asked: bool,
    /// The operation has come home, aborted.
    aborted: bool,
}

impl Recalls {
    /// Has the kernel asked with the next submission.
    pub(crate) fn push(&mut self, tag: Tag, of: Tag) {
        let recall = Some(Recall { tag, of, asked: false, aborted: false });
        match self.0.iter_mut().find(|entry| entry.is_none()) {
            Some(free) => *free = recall,
            None => self.0.push(recall),
        }
    }

    /// The next to ask for: its index, and the operation.
    pub(crate) fn wish(&self) -> Option<(usize, Tag)> {
        let entries = self.0.iter().enumerate();
        entries.flat_map(|(index, entry)| Some((index, entry.as_ref()?))).find_map(
            |(index, recall)| match recall.asked {
                true => None,
                false => Some((index, recall.of)),
            },
        )
    }

    /// The kernel has been asked.
    pub(crate) fn asked(&mut self, index: usize) {
        if let Some(recall) = self.0.get_mut(index).and_then(Option::as_mut) {
            recall.asked = true;
        }
    }

    /// An operation has come home, aborted: its wish is granted, whatever the kernel says later.
    pub(crate) fn came_home_aborted(&mut self, of: Tag) {
        let mine = self.0.iter_mut().flatten().filter(|recall| recall.of == of);
        mine.for_each(|recall| recall.aborted = true);
    }

    /// It has an answer: the wish's own tag, the operation, and whether that has come home aborted.
    pub(crate) fn answered(&mut self, index: usize) -> Option<(Tag, Tag, bool)> {
        self.0.get_mut(index)?.take().map(|recall| (recall.tag, recall.of, recall.aborted))
    }

    /// How many have none yet.
    pub(crate) fn len(&self) -> usize {
        self.0.iter().flatten().count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wish_is_told_once_and_its_place_is_used_again() {
        let mut recalls = Recalls::default();
        recalls.push(10, 1);
        recalls.push(20, 2);
        assert_eq!(recalls.wish(), Some((0, 1)));
        recalls.asked(0);
        assert_eq!(recalls.wish(), Some((1, 2)));
        assert_eq!((recalls.answered(0), recalls.answered(0)), (Some((10, 1, false)), None));
        recalls.push(30, 3);
        assert_eq!((recalls.len(), recalls.wish()), (2, Some((0, 3))));
        recalls.came_home_aborted(2);
        assert_eq!((recalls.answered(1), recalls.answered(7)), (Some((20, 2, true)), None));
    }
}
