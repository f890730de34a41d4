mod history;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use tempfile::TempDir;

use crate::control::*;

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

/// All events, in order.
#[derive(Clone, Default)]
struct Trace(Arc<Mutex<Vec<String>>>);

impl Trace {
    fn add(&self, line: impl Into<String>) {
        self.0.lock().unwrap().push(line.into());
    }

    fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }

    fn has(&self, line: &str) -> bool {
        self.count(line) > 0
    }

    fn count(&self, start: &str) -> usize {
        self.lines().iter().filter(|line| line.starts_with(start)).count()
    }

    /// Returns the lines from the first one with this prefix.
    fn since(&self, start: &str) -> Vec<String> {
        self.lines().into_iter().skip_while(|line| !line.starts_with(start)).collect()
    }
}

struct Fake {
    trace: Trace,
    health: FakePulse,
    /// Whether `apply` fails.
    refuses: bool,
    /// State of the target afterwards.
    after: (bool, bool),
    apply_takes: Duration,
    /// `apply` continues until this is true.
    apply_ends: fn(&Trace) -> bool,
    apply_panics: bool,
    stop_takes: Duration,
}

#[derive(Clone)]
struct FakePulse {
    trace: Trace,
    alive: Arc<AtomicBool>,
    fails: Arc<AtomicBool>,
    pending: Arc<Mutex<Vec<String>>>,
    idle: Option<String>,
}

impl FakePulse {
    fn set(&self, (alive, fails): (bool, bool)) {
        self.alive.store(alive, Ordering::SeqCst);
        self.fails.store(fails, Ordering::SeqCst);
    }
}

const WELL: (bool, bool) = (true, false);
const STUCK: (bool, bool) = (false, false);
const DEAD: (bool, bool) = (false, true);

impl Serve for Fake {
    type Pulse = FakePulse;

    fn pulse(&self) -> FakePulse {
        self.health.clone()
    }

    fn apply(&mut self, config: Config) -> Result<AppliedChange, String> {
        self.health.set(self.after);
        self.trace.add(format!("apply depth {}", config.limits.queue_depth));
        std::thread::sleep(self.apply_takes);
        let deadline = Instant::now() + PATIENCE;
        while !(self.apply_ends)(&self.trace) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!self.apply_panics);
        self.trace.add("applied");
        let configured = vec!["one change".to_owned()];
        let applied = AppliedChange { configured, ..AppliedChange::default() };
        if self.refuses { Err("no".to_owned()) } else { Ok(applied) }
    }

    fn change(
        &mut self,
        config: Config,
        persist: impl FnOnce() -> Result<(), String>,
    ) -> Result<AppliedChange, NotServed> {
        persist().map_err(NotServed::Unkept)?;
        self.apply(config).map_err(|sentence| NotServed::Unservable(crate::Fatal(sentence)))
    }

    fn leave(&self, until: Instant) {
        self.trace.add("leaving");
        std::thread::sleep(until.saturating_duration_since(Instant::now()));
        self.trace.add("left");
    }

    fn stop(self, deadline: Instant) {
        assert!(deadline <= Instant::now() + STOP_BUDGET);
        std::thread::sleep(self.stop_takes);
        self.trace.add("stopped");
    }
}

impl Pulse for FakePulse {
    fn alive(&mut self) -> bool {
        self.alive.load(Ordering::SeqCst)
    }

    fn failed(&self) -> Option<String> {
        self.fails.load(Ordering::SeqCst).then(|| "the reactor is gone".to_owned())
    }

    fn pending(&self) -> Vec<String> {
        self.pending.lock().unwrap().clone()
    }

    fn idle(&self) -> Option<String> {
        self.idle.clone()
    }

    fn part(&self, deadline: Instant) {
        assert!(deadline <= Instant::now() + STOP_BUDGET);
        self.trace.add("parted");
    }
}

struct Stage {
    trace: Trace,
    directory: TempDir,
    control: Control,
    orders: mpsc::Sender<Order>,
    served: RunningDaemon<Fake>,
}

fn stage(change: impl FnOnce(&mut Fake)) -> Stage {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("nvmfd.toml");
    std::fs::write(&file, TEXT).unwrap();
    let trace = Trace::default();
    let mut target = Fake {
        trace: trace.clone(),
        health: FakePulse {
            trace: trace.clone(),
            alive: Arc::default(),
            fails: Arc::default(),
            pending: Arc::default(),
            idle: None,
        },
        refuses: false,
        after: WELL,
        apply_takes: Duration::ZERO,
        apply_ends: |_| true,
        apply_panics: false,
        stop_takes: Duration::ZERO,
    };
    target.health.set(WELL);
    change(&mut target);
    let told = trace.clone();
    let manager = ServiceNotifier::new(move |states| {
        for state in states {
            told.add(state.to_string());
        }
    });
    let declared = EffectiveConfig::load(&file).unwrap();
    let (orders, wanted) = mpsc::channel(1);
    let control = Control::new(manager, None, wanted);
    Stage {
        trace,
        directory,
        control,
        orders,
        served: RunningDaemon {
            target,
            shown: watch::channel(Arc::new(RunningConfig::new(declared.clone()))).0,
            config: declared.config().clone(),
            declared,
            announcer: Announcer::default(),
            refusal: None,
        },
    }
}

/// A test that waits longer has failed.
const PATIENCE: Duration = Duration::from_secs(120);
/// Longer than any test; an operation that takes as long is abandoned.
const FOR_EVER: Duration = Duration::from_secs(3600);

/// An input to the daemon.
enum Act {
    Ask(ControlRequest),
    /// Waits until the trace has this number of lines with this prefix.
    Until(usize, &'static str),
}

const STOP: Act = Act::Ask(ControlRequest::Stop);
const RELOAD: Act = Act::Ask(ControlRequest::Reload);

impl Stage {
    /// Serves while the acts are executed, one after the other.
    fn play(self, acts: &[Act]) -> Result<(), String> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let outcome = runtime.block_on(async {
            let (sender, receiver) = mpsc::channel(8);
            let acting = async {
                for act in acts {
                    match act {
                        Act::Ask(ask) => sender.send(*ask).await.unwrap(),
                        Act::Until(count, start) => {
                            while self.trace.count(start) < *count {
                                tokio::time::sleep(Duration::from_millis(5)).await;
                            }
                        }
                    }
                }
                std::future::pending().await
            };
            let serving = timeout(PATIENCE, async {
                tokio::select! {
                    outcome = self.control.serve(self.served, receiver) => outcome,
                    () = acting => unreachable!(),
                }
            });
            serving.await.expect("it ends")
        });
        runtime.shutdown_background();
        outcome
    }
}

#[test]
fn a_stop_is_reported_to_the_service_manager_and_drains() {
    let stage = stage(|_| ());
    let trace = stage.trace.clone();
    stage.play(&[STOP]).unwrap();
    assert_eq!(
        trace.lines(),
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
fn paths_are_inaccessible_for_a_configured_time_before_a_stop() {
    let mut stage = stage(|_| ());
    stage.served.config.stop.inaccessible_ms = 30;
    let trace = stage.trace.clone();
    stage.play(&[STOP]).unwrap();
    assert_eq!(
        trace.since("STOPPING=1"),
        [
            "STOPPING=1",
            "EXTEND_TIMEOUT_USEC=5530000",
            "STATUS=leaving: hosts go on by other paths",
            "leaving",
            "left",
            "stopped"
        ]
    );
}

#[test]
fn a_second_stop_request_skips_the_time_for_path_failover() {
    let mut stage = stage(|_| ());
    stage.served.config.stop.inaccessible_ms = 3000;
    let trace = stage.trace.clone();
    stage.play(&[STOP, Act::Until(1, "leaving"), STOP]).unwrap();
    assert!(!trace.has("left") && !trace.has("stopped"));
}

#[test]
fn pending_objects_are_reported_to_the_service_manager() {
    let stage = stage(|fake| {
        let pending = ["listener a: no address", "namespace b: no device"].map(str::to_owned);
        fake.health.pending.lock().unwrap().extend(pending);
    });
    let (trace, line) = (stage.trace.clone(), "STATUS=serving; waiting for listener a: no address");
    stage.play(&[Act::Until(1, line), RELOAD, Act::Until(2, "READY=1"), STOP]).unwrap();
    assert!(trace.has(&format!("{line}; and 1 more")), "{:?}", trace.lines());
    assert_eq!(waiting(&[]), "serving everything that is configured");
}

#[test]
fn a_gateway_that_serves_nothing_is_reported_to_the_service_manager() {
    let idle = "gateway a of the group g1 serves nothing";
    let stage = stage(|fake| fake.health.idle = Some(idle.to_owned()));
    stage.play(&[Act::Until(1, "STATUS=gateway a of the group g1 serves nothing"), STOP]).unwrap();
}

#[test]
fn a_second_stop_request_ends_the_daemon_without_draining() {
    let stage = stage(|fake| fake.stop_takes = FOR_EVER);
    let trace = stage.trace.clone();
    stage.play(&[STOP, RELOAD, STOP]).unwrap();
    assert!(!trace.has("stopped"));
}

#[test]
fn a_reload_is_applied_and_notifies_ready_again() {
    let stage = stage(|_| ());
    let trace = stage.trace.clone();
    let text = format!("{TEXT}[limits]\nqueue_depth = 16\n").replace("disk1", "disk2");
    std::fs::write(stage.directory.path().join("nvmfd.toml"), text).unwrap();
    stage.play(&[RELOAD, Act::Until(2, "READY=1"), STOP]).unwrap();
    let lines = trace.lines();
    assert_eq!(lines[2], "RELOADING=1");
    assert!(lines[3].starts_with("MONOTONIC_USEC="));
    assert_eq!(lines[4..7], ["apply depth 16", "applied", "READY=1"]);
}

#[test]
fn a_configuration_with_errors_is_not_applied() {
    let stage = stage(|_| ());
    let trace = stage.trace.clone();
    std::fs::write(stage.directory.path().join("nvmfd.toml"), "nonsense = 1").unwrap();
    stage.play(&[RELOAD, Act::Until(2, "READY=1"), STOP]).unwrap();
    assert_eq!(trace.count("apply"), 0);
    assert!(trace.has("stopped"));
}

#[test]
fn a_refused_reload_leaves_the_target_serving() {
    let stage = stage(|fake| fake.refuses = true);
    let trace = stage.trace.clone();
    let (second, third) = (Act::Until(2, "READY=1"), Act::Until(3, "READY=1"));
    stage.play(&[RELOAD, second, RELOAD, third, STOP]).unwrap();
    assert_eq!(trace.count("applied"), 2);
    let status = "1 subsystem, 1 namespace on 127.0.0.1:4420; the last reload was refused";
    assert!(trace.has(&format!("STATUS={status}: see the log")));
    assert!(trace.has("stopped"));
}

#[test]
fn a_failed_target_ends_the_daemon_with_its_error() {
    let stage = stage(|fake| fake.health.set(DEAD));
    let trace = stage.trace.clone();
    assert_eq!(stage.play(&[]).unwrap_err(), "the reactor is gone");
    assert!(trace.has("STATUS=the reactor is gone"));
}

#[test]
fn the_watchdog_is_fed_only_while_no_reactor_is_stuck() {
    for health in [WELL, STUCK] {
        let Stage { trace, mut control, served, directory: _directory, orders: _orders } =
            stage(|fake| fake.health.set(health));
        control.watchdog = Some(Duration::from_millis(10));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (_sender, receiver) = mpsc::channel(1);
            let _ = timeout(Duration::from_millis(200), control.serve(served, receiver)).await;
        });
        assert_eq!(trace.has("WATCHDOG=1"), health == WELL);
    }
}

/// A stage whose reload takes some time, and whose watchdog requires ten ticks per second.
fn slow_reload(change: impl FnOnce(&mut Fake)) -> Stage {
    let mut stage = stage(|fake| {
        fake.apply_takes = Duration::from_secs(1);
        change(fake);
    });
    stage.control.watchdog = Some(Duration::from_millis(200));
    stage
}

const APPLYING: Act = Act::Until(1, "apply depth");

#[test]
fn the_watchdog_is_fed_and_a_stop_accepted_during_a_slow_reload() {
    let fed_since_the_stop = |trace: &Trace| {
        trace.has("STOPPING=1") && trace.since("STOPPING=1").contains(&"WATCHDOG=1".to_owned())
    };
    let stage = slow_reload(|fake| fake.apply_ends = fed_since_the_stop);
    let trace = stage.trace.clone();
    // Notified before the request to stop, and after.
    stage.play(&[RELOAD, APPLYING, Act::Until(8, "WATCHDOG=1"), STOP]).unwrap();
    let mut lines = trace.since("apply depth");
    let applied = lines.iter().position(|line| line == "applied").expect("it ended");
    let ticks = lines[..applied].iter().filter(|line| *line == "WATCHDOG=1").count();
    assert!(ticks >= 8, "{ticks} ticks");
    let heard = lines.iter().position(|line| line == "STOPPING=1").expect("it was heard");
    assert!(heard < applied, "heard while the reload ran: {lines:?}");
    assert!(lines[heard..applied].contains(&"WATCHDOG=1".to_owned()));
    lines.retain(|line| line != "WATCHDOG=1");
    assert_eq!(
        lines[1..],
        [
            "STOPPING=1",
            "STATUS=stopping after the reload",
            "applied",
            "STOPPING=1",
            "STATUS=stopping",
            "stopped"
        ]
    );
}

#[test]
fn a_reactor_that_gets_stuck_during_a_reload_starves_the_watchdog() {
    let stage = slow_reload(|fake| fake.after = STUCK);
    let trace = stage.trace.clone();
    let (fed, ready) = (Act::Until(3, "WATCHDOG=1"), Act::Until(2, "READY=1"));
    stage.play(&[fed, RELOAD, ready, STOP]).unwrap();
    let fed = trace.since("apply depth").iter().filter(|line| *line == "WATCHDOG=1").count();
    // One check may have been in progress.
    assert!(fed <= 1, "{:?}", trace.lines());
}

#[test]
fn a_target_failure_is_detected_before_a_running_reload_ends() {
    for acts in [&[RELOAD][..], &[RELOAD, APPLYING, STOP]] {
        let stage = slow_reload(|fake| (fake.after, fake.apply_takes) = (DEAD, FOR_EVER));
        let trace = stage.trace.clone();
        assert_eq!(stage.play(acts).unwrap_err(), "the reactor is gone");
        assert!(!trace.has("applied"));
        assert!(trace.has("STATUS=the reactor is gone"));
    }
}

#[test]
fn reload_requests_during_a_reload_are_coalesced() {
    let stage = slow_reload(|_| ());
    let trace = stage.trace.clone();
    let third = Act::Until(3, "READY=1");
    stage.play(&[RELOAD, APPLYING, RELOAD, RELOAD, RELOAD, third, STOP]).unwrap();
    assert_eq!(trace.count("applied"), 2);
    assert_eq!(trace.count("RELOADING=1"), 2);
}

/// That a device is pending, which may be why it does not end, is less urgent.
#[test]
fn a_change_that_does_not_end_is_named_until_it_ends() {
    let line = "STATUS=the reload does not end, and all other changes wait for it";
    let mut stage = slow_reload(|fake| {
        fake.health.pending.lock().unwrap().push("namespace b: no device".to_owned());
        fake.apply_ends = |trace| trace.count("STATUS=the reload") > 1;
    });
    stage.control.slow = Duration::from_millis(1);
    let trace = stage.trace.clone();
    let after = Act::Until(3, "STATUS=serving; waiting for namespace b");
    stage.play(&[RELOAD, Act::Until(1, "applied"), after, STOP]).unwrap();
    let named = trace.since(line);
    let end = named.iter().position(|line| line == "applied").expect("it ended");
    assert!(!named[..end].iter().any(|line| line.starts_with("STATUS=serving")), "{named:?}");
    assert!(!named[end..].iter().any(|line| line.starts_with("STATUS=the reload")), "{named:?}");
}

#[test]
fn a_stop_request_during_a_reload_precedes_queued_reloads() {
    let stage = slow_reload(|_| ());
    let trace = stage.trace.clone();
    stage.play(&[RELOAD, APPLYING, RELOAD, STOP, RELOAD]).unwrap();
    assert_eq!(trace.count("applied"), 1);
    assert!(trace.has("stopped"));
}

#[test]
fn a_second_stop_request_does_not_wait_for_a_reload() {
    let stage = slow_reload(|fake| fake.apply_takes = FOR_EVER);
    let trace = stage.trace.clone();
    stage.play(&[RELOAD, APPLYING, STOP, RELOAD, STOP]).unwrap();
    assert!(!trace.has("stopped"));
}

#[test]
fn a_hung_reload_delays_a_stop_only_for_the_grace_period() {
    let stage = slow_reload(|fake| fake.apply_takes = FOR_EVER);
    let trace = stage.trace.clone();
    let began = Instant::now();
    stage.play(&[RELOAD, APPLYING, STOP]).unwrap();
    assert!(began.elapsed() >= RELOAD_GRACE);
    assert!(!trace.has("stopped"), "the reload has the target");
    assert!(trace.has("parted"), "hosts are told all the same");
    // Fifty are due; a machine that stalls may miss some.
    let fed = trace.count("WATCHDOG=1");
    assert!(fed >= 10, "the watchdog is fed {fed} times in {RELOAD_GRACE:?}");
}

#[test]
fn a_panic_during_a_reload_ends_the_daemon_with_an_error() {
    for acts in [&[RELOAD][..], &[RELOAD, APPLYING, STOP]] {
        let stage = slow_reload(|fake| fake.apply_panics = true);
        let error = stage.play(acts).unwrap_err();
        assert_eq!(error, "reload panicked (bug)");
    }
}

#[test]
fn two_daemons_never_share_a_state_directory() {
    let stage = stage(|_| ());
    let file = stage.directory.path().join("nvmfd.toml");
    let state = stage.directory.path().join("state");
    std::fs::create_dir(&state).unwrap();
    std::fs::write(&file, format!("state_directory = {state:?}\n{TEXT}")).unwrap();
    let _other = StateDirLock::take(&state).unwrap().unwrap();
    let (_asks, asked) = std::sync::mpsc::channel();
    let error = run_for(EffectiveConfig::load(&file).unwrap(), asked).unwrap_err();
    assert!(error.contains("in use by another nvmfd"), "{error}");
}

#[test]
fn a_change_that_is_refused_is_not_in_force_after_a_restart() {
    use crate::blockdev::crash_point::testing::run_before;

    let stage = stage(|_| ());
    let file = stage.directory.path().join("nvmfd.toml");
    let [state, aside] = ["state", "aside"].map(|name| stage.directory.path().join(name));
    std::fs::create_dir(&state).unwrap();
    let two = "[[subsystem.namespace]]\nnsid = 2\nkind = \"null\"\nsize = \"1GiB\"\n";
    std::fs::write(&file, format!("state_directory = {state:?}\n{TEXT}{two}")).unwrap();
    let declared = EffectiveConfig::load(&file).unwrap();
    let config = declared.config().clone();
    let served = RunningDaemon { config, declared, ..stage.served };
    let remove_if = |served: RunningDaemon<Fake>, nsid, if_match| {
        let subsystem = "nqn.2026-11.io.nvmfd:disk1".to_owned();
        let changes = vec![crate::api::Change::RemoveNamespace { subsystem, nsid }];
        let wanted = crate::api::Wanted { changes, dry_run: false };
        let request = change::ChangeRequest { wanted, by: Requester::Unknown, if_match };
        let (answer, answered) = tokio::sync::oneshot::channel();
        let order = Order { work: change::ConfigRequest::Change(request), answer };
        (served.execute(order), answered.blocking_recv().unwrap())
    };
    let remove = |served, nsid| remove_if(served, nsid, None);
    let first = served.declared.digest();
    let (served, answer) = remove_if(served, 2, Some(vec![first.clone()]));
    answer.unwrap();
    // Another administrator still has the first configuration before him.
    let (served, answer) = remove_if(served, 1, Some(vec![first]));
    assert_eq!(answer, Err(handle::ChangeError::Stale));
    // After the rename the directory cannot be synced once; then it can.
    run_before(5, move || {
        std::fs::rename(&state, &aside).unwrap();
        run_before(1, move || std::fs::rename(&aside, &state).unwrap());
    });
    let (_, answer) = remove(served, 1);
    assert!(matches!(answer, Err(handle::ChangeError::Unkept(_))), "{answer:?}");
    assert_eq!(stage.trace.count("applied"), 1, "nobody has seen it");
    let after = EffectiveConfig::load(&file).unwrap();
    assert_eq!(after.changes().kept.len(), 1);
    assert_eq!(after.config().subsystems[0].namespaces.len(), 1);
}

#[test]
fn the_status_reports_the_result_of_the_last_reload() {
    let stage = stage(|_| ());
    let file = stage.directory.path().join("nvmfd.toml");
    let told = |served: &RunningDaemon<Fake>| {
        let told = served.status().contains("the last reload was refused");
        let last = served.shown.borrow().last_reload.get().expect("a reload");
        assert_eq!((last.successful, last.errors.is_empty()), (!told, !told));
        told
    };
    let order = |served: RunningDaemon<Fake>| {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let served = served.execute(Order {
            work: change::ConfigRequest::Reload { by: Requester::User(5), if_match: None },
            answer,
        });
        (served, answered.blocking_recv().unwrap())
    };
    std::fs::write(&file, "nonsense").unwrap();
    let served = stage.served.reload();
    assert!(told(&served));
    std::fs::write(&file, TEXT).unwrap();
    let (served, answer) = order(served);
    answer.unwrap();
    assert!(!told(&served));
    std::fs::write(&file, "nonsense").unwrap();
    let (served, answer) = order(served);
    assert!(answer.is_err() && told(&served));
}

/// It may have waited for hours behind one whose directory hung.
#[test]
fn a_request_whose_client_has_left_before_it_begins_is_dropped() {
    let stage = stage(|_| ());
    let (answer, answered) = tokio::sync::oneshot::channel();
    drop(answered);
    let work = change::ConfigRequest::Reload { by: Requester::User(5), if_match: None };
    let served = stage.served.execute(Order { work, answer });
    assert_eq!(stage.trace.lines(), Vec::<String>::new());
    let (answer, answered) = tokio::sync::oneshot::channel();
    let work = change::ConfigRequest::Reload { by: Requester::User(5), if_match: None };
    served.execute(Order { work, answer });
    answered.blocking_recv().unwrap().unwrap();
    assert_eq!(stage.trace.count("applied"), 1);
}

#[test]
fn a_reload_reads_the_token_again_and_is_refused_if_it_cannot() {
    use std::os::unix::fs::PermissionsExt;

    let stage = stage(|_| ());
    let file = stage.directory.path().join("nvmfd.toml");
    let path = stage.directory.path().join("token");
    let text = format!(
        "{TEXT}[management]\nhttp = '127.0.0.1:4480'\nhttp_token_file = '{}'\n",
        path.display()
    );
    let mut served = Some(stage.served);
    let mut reload = |text: &str, token: Option<&str>| {
        std::fs::write(&file, text).unwrap();
        let _ = std::fs::remove_file(&path);
        if let Some(token) = token {
            std::fs::write(&path, token).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        }
        let before = stage.trace.count("applied");
        let (answer, answered) = tokio::sync::oneshot::channel();
        let work = change::ConfigRequest::Reload { by: Requester::Token, if_match: None };
        let next = served.take().unwrap().execute(Order { work, answer });
        let running = Arc::clone(&next.shown.borrow());
        served = Some(next);
        let is_done = answered.blocking_recv().unwrap().is_ok();
        assert_eq!(stage.trace.count("applied") > before, is_done);
        (is_done, ["a", "b"].map(|digit| running.token.admits(&digit.repeat(32))))
    };
    assert_eq!(reload(&text, Some(&"a".repeat(32))), (true, [true, false]));
    assert_eq!(reload(&text, Some(&"b".repeat(31))), (false, [true, false]), "it is too short");
    assert_eq!(reload(&text, None), (false, [true, false]));
    assert_eq!(reload(&text, Some(&"b".repeat(32))), (true, [false, true]));
    assert_eq!(reload(TEXT, None), (true, [false, false]), "no token is no right");
}

#[test]
fn a_pending_listener_does_not_hide_a_refused_reload() {
    let stage = stage(|fake| {
        fake.refuses = true;
        fake.health.pending.lock().unwrap().push("listener a: no address".to_owned());
    });
    let line = "STATUS=serving; waiting for listener a: no address; the last reload was refused";
    stage.play(&[RELOAD, Act::Until(1, line), STOP]).unwrap();
}
