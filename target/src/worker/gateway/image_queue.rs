//! The order of tasks on images.

use std::collections::{BTreeSet, VecDeque};

use super::cluster::ImageJob;

/// Tasks on images: one at a time and in order for each ANA group and data client. Those of other groups
/// do not wait: images may be in another pool, or on other OSDs, than one that hangs. Neither do those
/// for the next client: a task for the former one may hang, and has no effect any more.
#[derive(Default)]
pub(super) struct ImageQueue {
    waiting: VecDeque<ImageJob>,
    /// Generations and ANA groups with a task that has started.
    busy: BTreeSet<(u64, u32)>,
}

impl ImageQueue {
    pub(super) fn push(&mut self, job: ImageJob) {
        self.waiting.push_back(job);
    }

    /// The next task that may start. Whoever starts it says when it has ended.
    pub(super) fn start(&mut self) -> Option<ImageJob> {
        let at = self.waiting.iter().position(|job| !self.busy.contains(&job.tenure()))?;
        let job = self.waiting.remove(at)?;
        self.busy.insert(job.tenure());
        Some(job)
    }

    /// The task of an ANA group has ended.
    pub(super) fn end(&mut self, tenure: (u64, u32)) {
        self.busy.remove(&tenure);
    }

    /// Whether an ANA group has a task.
    pub(super) fn has(&self, tenure: (u64, u32)) -> bool {
        self.busy.contains(&tenure) || self.waiting.iter().any(|job| job.tenure() == tenure)
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
        queue.end((0, 2));
        assert_eq!((queue.has((0, 1)), queue.has((0, 2))), (true, false));
        assert!(queue.start().is_none());
        queue.end((0, 1));
        let next = queue.start().map(|job| job.operation);
        assert_eq!(next, Some(Operation::Acquire(1, Vec::new())));
        queue.push(job(Operation::Release(1), 1));
        queue.clear();
        queue.end((0, 1));
        assert!(queue.start().is_none() && !queue.has((0, 1)));
    }

    #[test]
    fn a_hung_task_for_a_former_client_does_not_delay_the_next_client() {
        let mut queue = ImageQueue::default();
        queue.push(job(Operation::Release(1), 1));
        assert!(queue.start().is_some());
        queue.clear();
        queue.push(ImageJob { generation: 1, ..job(Operation::Acquire(1, Vec::new()), 1) });
        assert_eq!(queue.start().map(|job| job.generation), Some(1));
        queue.end((0, 1));
        assert!(queue.has((1, 1)), "the former task has ended");
    }
}
