//! The order of tasks on images.

use std::collections::{BTreeSet, VecDeque};

use super::cluster::ImageJob;

/// Tasks on images: one at a time and in order for each ANA group. Those of other groups do not
/// wait: images may be in another pool, or on other OSDs, than one that hangs.
#[derive(Default)]
pub(super) struct ImageQueue {
    waiting: VecDeque<ImageJob>,
    /// ANA groups with a task that has started.
    busy: BTreeSet<u32>,
}

impl ImageQueue {
    pub(super) fn push(&mut self, job: ImageJob) {
        self.waiting.push_back(job);
    }

    /// The next task that may start. Whoever starts it says when it has ended.
    pub(super) fn start(&mut self) -> Option<ImageJob> {
        let at = self.waiting.iter().position(|job| !self.busy.contains(&job.group))?;
        let job = self.waiting.remove(at)?;
        self.busy.insert(job.group);
        Some(job)
    }

    /// The task of an ANA group has ended.
    pub(super) fn end(&mut self, group: u32) {
        self.busy.remove(&group);
    }

    /// Whether an ANA group has a task.
    pub(super) fn has(&self, group: u32) -> bool {
        self.busy.contains(&group) || self.waiting.iter().any(|job| job.group == group)
    }

    /// Drops the tasks that have not started.
    pub(super) fn clear(&mut self) {
        self.waiting.clear();
    }
}

#[cfg(test)]
mod tests {
    use nvmfd_gateway::Operation;

    use super::*;

    fn job(operation: Operation, group: u32) -> ImageJob {
        ImageJob { id: None, generation: 0, group, operation }
    }

    #[test]
    fn tasks_on_images_are_in_order_in_each_ana_group_only() {
        let mut queue = ImageQueue::default();
        queue.push(job(Operation::Release(1), 1));
        queue.push(job(Operation::Acquire(1, Vec::new()), 1));
        queue.push(job(Operation::Acquire(2, Vec::new()), 2));
        let mut started = || queue.start().map(|job| job.operation);
        assert_eq!(started(), Some(Operation::Release(1)));
        assert_eq!(started(), Some(Operation::Acquire(2, Vec::new())), "the release hangs");
        assert_eq!(started(), None);
        queue.end(2);
        assert_eq!((queue.has(1), queue.has(2)), (true, false));
        assert!(queue.start().is_none());
        queue.end(1);
        let next = queue.start().map(|job| job.operation);
        assert_eq!(next, Some(Operation::Acquire(1, Vec::new())));
        queue.push(job(Operation::Release(1), 1));
        queue.clear();
        queue.end(1);
        assert!(queue.start().is_none() && !queue.has(1));
    }
}
