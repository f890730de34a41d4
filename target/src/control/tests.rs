use std::sync::{Arc, Mutex};

use tempfile::TempDir;

use super::*;

const TEXT: &str = r#"
[[listener]]
address = "127.0.0.1"
[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:disk1"
allow_any_host = true
[[subsystem.namespace]]
nsid = 1
kind = "null"
size = "1GiB"
"#;

/// Everything that happens, in order.
#[derive(Clone, Default)]
struct Story(Arc<Mutex<Vec<String>>>);

impl Story {
    fn add(&self, line: impl Into<String>) {
        self.0.lock().unwrap().push(line.into());
    }

    fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    fn has(&self, line: &str) -> bool {
        self.lines().iter().any(|each| each == line)
    }
}

struct Fake {
    story: Story,
    /// What `apply` answers.
    refuses: bool,
    alive: bool,
    fails: bool,
    stop_takes: Duration,
}

impl Serve for Fake {
    fn apply(&mut self, config: Config) -> Result<Vec<String>, String> {
        self.story.add(format!("apply depth {}", config.limits.queue_depth));
        if self.refuses { Err("no".to_owned()) } else { Ok(vec!["one change".to_owned()]) }
    }

    fn alive(&mut self) -> bool {
        self.alive
    }

    fn failed(&self) -> Option<String> {
        self.fails.then(|| "the reactor is gone".to_owned())
    }

    fn stop(self, deadline: Instant) {
        assert!(deadline <= Instant::now() + STOP_BUDGET);
        std::thread::sleep(self.stop_takes);
        self.story.add("stopped");
    }
}

struct Stage {
    story: Story,
    folder: TempDir,
    control: Control<Fake>,
}

fn stage(change: impl FnOnce(&mut Fake)) -> Stage {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("nvmfd.toml");
    std::fs::write(&file, TEXT).unwrap();
    let story = Story::default();
    let mut target = Fake {
        story: story.clone(),
        refuses: false,
        alive: true,
        fails: false,
        stop_takes: Duration::ZERO,
    };
    change(&mut target);
    let told = story.clone();
    let manager = Manager::new(move |states| {
        for state in states {
            told.add(state.to_string());
        }
    });
    let config = Config::parse(TEXT).unwrap();
    let control = Control { file, config, target, manager, watchdog: None };
    Stage { story, folder, control }
}

fn act(control: Control<Fake>, asks: &[Ask]) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let outcome = runtime.block_on(async {
        let (sender, receiver) = mpsc::channel(8);
        for ask in asks {
            sender.send(*ask).await.unwrap();
        }
        let serving = control.serve(receiver);
        let outcome = timeout(Duration::from_secs(20), serving).await.expect("it ends");
        drop(sender);
        outcome
    });
    runtime.shutdown_background();
    outcome
}

#[test]
fn a_stop_is_told_and_drains() {
    let Stage { story, control, .. } = stage(|_| ());
    act(control, &[Ask::Stop]).unwrap();
    assert_eq!(
        story.lines(),
        [
            "READY=1",
            "STATUS=1 subsystem, 1 namespace on 127.0.0.1:4420",
            "STOPPING=1",
            "STATUS=stopping",
            "stopped"
        ]
    );
}

#[test]
fn whoever_asks_twice_does_not_wait() {
    let Stage { story, control, .. } = stage(|fake| fake.stop_takes = Duration::from_secs(3));
    let began = Instant::now();
    act(control, &[Ask::Stop, Ask::Reload, Ask::Stop]).unwrap();
    assert!(began.elapsed() < Duration::from_secs(2));
    assert!(!story.has("stopped"));
}

#[test]
fn a_reload_applies_and_says_ready_again() {
    let Stage { story, folder, control } = stage(|_| ());
    let text = format!("{TEXT}[limits]\nqueue_depth = 16\n").replace("disk1", "disk2");
    std::fs::write(folder.path().join("nvmfd.toml"), text).unwrap();
    act(control, &[Ask::Reload, Ask::Stop]).unwrap();
    let lines = story.lines();
    assert_eq!(lines[2], "RELOADING=1");
    assert!(lines[3].starts_with("MONOTONIC_USEC="));
    assert_eq!(lines[4], "apply depth 16");
    assert_eq!(lines[5], "READY=1");
}

#[test]
fn a_text_with_mistakes_is_not_applied() {
    let Stage { story, folder, control } = stage(|_| ());
    std::fs::write(folder.path().join("nvmfd.toml"), "nonsense = 1").unwrap();
    act(control, &[Ask::Reload, Ask::Stop]).unwrap();
    assert!(!story.lines().iter().any(|line| line.starts_with("apply")));
    assert_eq!(story.lines().iter().filter(|line| *line == "READY=1").count(), 2);
    assert!(story.has("stopped"));
}

#[test]
fn a_refused_reload_leaves_the_target_serving() {
    let Stage { story, folder: _folder, control } = stage(|fake| fake.refuses = true);
    act(control, &[Ask::Reload, Ask::Reload, Ask::Stop]).unwrap();
    assert_eq!(story.lines().iter().filter(|line| line.starts_with("apply")).count(), 2);
    assert!(story.has("stopped"));
}

#[test]
fn a_dead_target_ends_the_daemon_with_its_sentence() {
    let Stage { story, control, .. } = stage(|fake| fake.fails = true);
    assert_eq!(act(control, &[]).unwrap_err(), "the reactor is gone");
    assert!(story.has("STATUS=the reactor is gone"));
}

#[test]
fn the_watchdog_is_fed_only_while_every_reactor_turns() {
    for alive in [true, false] {
        let Stage { story, mut control, .. } = stage(|fake| fake.alive = alive);
        control.watchdog = Some(Duration::from_millis(10));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (_sender, receiver) = mpsc::channel(1);
            let _ = timeout(Duration::from_millis(200), control.serve(receiver)).await;
        });
        assert_eq!(story.has("WATCHDOG=1"), alive);
    }
}
