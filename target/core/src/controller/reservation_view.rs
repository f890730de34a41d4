//! Reservation state of one controller: restrictions of its host, its notification mask, and
//! pending notifications.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use nvme::reservation::{NotificationMask, NotificationPage, NotificationType};
use nvmfd_blockdev::lock;

use crate::subsystem::MAX_NSID;

use crate::subsystem::reservation::Barred;

/// Maximum of notification pages. The log can count 255 after the first.
const PAGES: usize = 256;

/// Reservation state shared by a controller's queues and the registry.
#[derive(Debug, Default)]
pub struct ReservationView {
    /// By namespace id. Empty for a controller without namespaces.
    namespaces: Box<[Marks]>,
    /// There are pages without an event so far.
    news: AtomicBool,
    log: Mutex<Log>,
}

#[derive(Debug, Default)]
struct Marks {
    barred: AtomicU8,
    /// Bits 7:0 of feature 82h.
    mask: AtomicU8,
}

#[derive(Debug, Default)]
struct Log {
    /// Number of the latest page.
    count: u64,
    /// Number of the page that was read last; 0 if that was an empty one.
    read: u64,
    pages: VecDeque<NotificationPage>,
}

impl ReservationView {
    /// For a controller with namespaces: no restriction, no mask.
    pub fn new() -> ReservationView {
        let namespaces = (0..=MAX_NSID).map(|_| Marks::default()).collect();
        ReservationView { namespaces, ..ReservationView::default() }
    }

    /// Commands that are not allowed for a namespace: one relaxed load. None for an invalid id;
    /// such a command fails for another reason.
    #[inline]
    pub fn barred(&self, nsid: u32) -> Barred {
        let marks = self.namespaces.get(nsid as usize);
        Barred(marks.map_or(0, |marks| marks.barred.load(Ordering::Relaxed)))
    }

    /// Sets the restriction. All earlier writes are visible to a reactor that gets a message
    /// afterwards.
    pub fn set_barred(&self, nsid: u32, barred: Barred) {
        if let Some(marks) = self.namespaces.get(nsid as usize) {
            marks.barred.store(barred.0, Ordering::SeqCst);
        }
    }

    /// Feature 82h of a namespace.
    pub fn mask(&self, nsid: u32) -> NotificationMask {
        let marks = self.namespaces.get(nsid as usize);
        NotificationMask(marks.map_or(0, |marks| marks.mask.load(Ordering::Relaxed).into()))
    }

    /// Sets feature 82h of a namespace.
    pub(crate) fn set_mask(&self, nsid: u32, mask: NotificationMask) {
        if let Some(marks) = self.namespaces.get(nsid as usize) {
            marks.mask.store(mask.0 as u8, Ordering::Relaxed);
        }
    }

    /// Adds a page to the log, unless the host has masked it. If there are too many, the oldest is
    /// removed, which the numbers of the others show. Returns whether it was added.
    pub fn notify(&self, nsid: u32, kind: NotificationType) -> bool {
        if self.mask(nsid).0 & NotificationMask::bit(kind) != 0 {
            return false;
        }
        let mut log = lock(&self.log);
        // 0 means an empty page.
        log.count = log.count.checked_add(1).unwrap_or(1);
        if log.pages.len() == PAGES {
            log.pages.pop_front();
        }
        let page = NotificationPage { count: log.count, kind, waiting: 0, nsid };
        log.pages.push_back(page);
        self.news.store(true, Ordering::Release);
        true
    }

    /// Whether log pages were added without an event; clears this state.
    pub(crate) fn take_news(&self) -> bool {
        // A load first: usually there are none, and the line stays shared.
        self.news.load(Ordering::Relaxed) && self.news.swap(false, Ordering::Acquire)
    }

    /// The oldest page; an empty one when there is none.
    #[must_use]
    pub fn page(&self) -> NotificationPage {
        let mut log = lock(&self.log);
        log.read = log.pages.front().map_or(0, |page| page.count);
        match log.pages.front() {
            Some(page) => {
                let waiting = (log.pages.len() - 1).try_into().unwrap_or(u8::MAX);
                NotificationPage { waiting, ..*page }
            }
            None => NotificationPage::default(),
        }
    }

    /// The host has read the page that [`ReservationView::page`] returned last; when there are more,
    /// they are news again.
    pub fn acknowledge(&self) {
        let mut log = lock(&self.log);
        let read = log.read;
        // Another thread may have added or removed pages since.
        if log.pages.front().is_some_and(|page| page.count == read) {
            log.pages.pop_front();
        }
        self.news.store(!log.pages.is_empty(), Ordering::Release);
    }

    /// Controller reset: clears masks and pages. Restrictions stay.
    pub fn reset(&self) {
        for marks in &self.namespaces {
            marks.mask.store(0, Ordering::Relaxed);
        }
        *lock(&self.log) = Log::default();
        self.news.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use crate::controller::reservation_view::*;

    const RELEASED: NotificationType = NotificationType::RESERVATION_RELEASED;

    #[test]
    fn access_restrictions_are_recorded_per_valid_namespace_id() {
        let standing = ReservationView::new();
        standing.set_barred(1, Barred::ALL);
        standing.set_barred(MAX_NSID, Barred::WRITE);
        let found = [0, 1, 2, MAX_NSID, MAX_NSID + 1, u32::MAX].map(|id| standing.barred(id).0);
        assert_eq!(found, [0, 3, 0, 2, 0, 0]);
        standing.set_barred(u32::MAX, Barred::ALL);
        assert_eq!(ReservationView::default().barred(1), Barred(0));
    }

    #[test]
    fn notification_pages_are_counted_and_read_one_at_a_time() {
        let standing = ReservationView::new();
        assert!(!standing.take_news());
        assert_eq!(standing.page(), NotificationPage::default());
        assert!(standing.notify(3, RELEASED) && standing.notify(4, RELEASED));
        assert!(standing.take_news() && !standing.take_news());
        let page = standing.page();
        assert_eq!((page.count, page.nsid, page.kind, page.waiting), (1, 3, RELEASED, 1));
        standing.acknowledge();
        assert!(standing.take_news(), "one more waits");
        assert_eq!((standing.page().count, standing.page().waiting), (2, 0));
        standing.acknowledge();
        assert!(!standing.take_news());
        assert_eq!(standing.page(), NotificationPage::default());
    }

    #[test]
    fn masked_notifications_are_not_counted() {
        let standing = ReservationView::new();
        standing.set_mask(1, NotificationMask(0).with_reservation_released(true));
        assert!(!standing.notify(1, RELEASED) && standing.notify(2, RELEASED));
        assert!(standing.notify(1, NotificationType::REGISTRATION_PREEMPTED));
        assert_eq!((standing.page().count, standing.page().nsid), (1, 2));
        standing.set_barred(1, Barred::WRITE);
        standing.reset();
        assert_eq!((standing.mask(1).0, standing.page().count), (0, 0));
        assert_eq!(standing.barred(1), Barred::WRITE);
        assert!(!standing.take_news());
    }

    #[test]
    fn the_notification_log_is_bounded_and_its_count_shows_losses() {
        let standing = ReservationView::new();
        for _ in 0..300 {
            standing.notify(1, RELEASED);
        }
        let page = standing.page();
        assert_eq!((page.count, page.waiting), (300 - PAGES as u64 + 1, 255));
    }

    #[test]
    fn pages_added_while_the_log_is_read_are_not_acknowledged_unread() {
        let standing = ReservationView::new();
        assert_eq!(standing.page(), NotificationPage::default());
        standing.notify(1, RELEASED);
        standing.acknowledge();
        assert!(standing.take_news());
        assert_eq!(standing.page().count, 1);
        // The one that was read is removed to make room.
        for _ in 0..PAGES {
            standing.notify(2, RELEASED);
        }
        standing.acknowledge();
        assert_eq!(standing.page().count, 2);
    }
}
