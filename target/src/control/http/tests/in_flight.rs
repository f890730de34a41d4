use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{sleep, spawn};
use std::time::Duration;

use super::*;
use crate::core::message::{Message, mailbox};

const REQUESTS: u32 = 30;
const INTERVAL_MS: u32 = 100;

/// Runs `visitor` beside a reactor. Returns how often that was asked, and how often it may be.
fn requests(answers: bool, visitor: impl FnOnce(&Path) + Send + 'static) -> (u32, u32) {
    let (sender, mailbox) = mailbox().unwrap();
    let (is_over, asked) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let reactor = spawn({
        let (is_over, asked) = (Arc::clone(&is_over), Arc::clone(&asked));
        move || {
            let mut unanswered = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                while let Some(Message::InFlight(answer)) = mailbox.take() {
                    asked.fetch_add(1, Ordering::Relaxed);
                    match answers {
                        true => answer.send(Vec::new()).unwrap(),
                        false => unanswered.push(answer),
                    }
                }
                sleep(Duration::from_millis(1));
            }
        }
    });
    let begun = Instant::now();
    stage_with("", vec![sender]).visit(visitor);
    let passed_ms = begun.elapsed().as_millis() as u32;
    is_over.store(true, Ordering::Relaxed);
    reactor.join().unwrap();
    (asked.load(Ordering::Relaxed), 1 + passed_ms / INTERVAL_MS)
}

#[test]
fn reactors_describe_their_commands_ten_times_a_second_at_most() {
    let (asked, most) = requests(true, |socket| {
        for n in 0..REQUESTS {
            match n % 2 {
                0 => assert_eq!(get(socket, "/v1/inflight"), (200, json!([]))),
                _ => assert!(text(socket, "/metrics").contains("nvmfd_oldest_command_seconds")),
            }
        }
    });
    assert!((1..=most).contains(&asked), "{asked} requests of {most}");
}

#[test]
fn clients_that_do_not_wait_for_the_answer_ask_no_more_often() {
    let (asked, most) = requests(false, |socket| {
        for _ in 0..REQUESTS {
            let mut stream = UnixStream::connect(socket).unwrap();
            write!(stream, "GET /v1/inflight HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
            sleep(Duration::from_millis(5));
        }
    });
    assert!((1..=most).contains(&asked), "{asked} requests of {most}");
}
