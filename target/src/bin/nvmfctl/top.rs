//! `nvmfctl top`: a live view of hosts, namespaces, latencies and reactors.

use std::io::{IsTerminal, stdout};
use std::time::Duration;

use clap::Args;
use nvmfd::api::stats::{Reactor, Stats};
use nvmfd::count;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Borders, Cell, Paragraph, Row, Table};
use ratatui::{Frame, Terminal};
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::client::Client;
use crate::derived_stats::{Rate, by_kind, by_row, bytes, seconds, short, time, together};
use crate::output::{Failure, duration};
use crate::stats::{interval, look};

/// Default columns of the view that is printed once (`COLUMNS`).
const COLUMNS: u16 = 132;

/// Arguments of `nvmfctl top`.
#[derive(Args)]
pub(crate) struct TopArgs {
    /// Print one view as text and end
    #[arg(long)]
    once: bool,
    /// Set the seconds between updates
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,
}

/// Minimum width at which all figures are displayed beside the names.
const WIDE: u16 = 110;

/// Mode of the view.
struct View {
    /// Rates since the last update.
    since: Stats,
    /// Totals since the start of the daemon.
    uptime_us: u64,
    /// Interactive, with a key to quit.
    live: bool,
}

/// A column of figures.
struct Figure {
    head: &'static str,
    columns: u16,
    /// Displayed only if there is space.
    extra: bool,
    of: fn(&Rate) -> String,
}

const FIGURES: [Figure; 7] = [
    Figure { head: "IOPS", columns: 7, extra: false, of: |rate| short(rate.iops) },
    Figure {
        head: "BANDWIDTH",
        columns: 11,
        extra: false,
        of: |rate| format!("{}/s", bytes(rate.bytes_per_s)),
    },
    Figure { head: "MEAN", columns: 8, extra: false, of: |rate| took(rate, rate.latency.mean_us) },
    Figure { head: "P50", columns: 8, extra: true, of: |rate| took(rate, rate.latency.p50_us) },
    Figure { head: "P99", columns: 8, extra: false, of: |rate| took(rate, rate.latency.p99_us) },
    Figure { head: "P99.9", columns: 8, extra: true, of: |rate| took(rate, rate.latency.p999_us) },
    Figure { head: "DEPTH", columns: 6, extra: false, of: |rate| format!("{:.1}", rate.depth) },
];

pub(crate) async fn run(args: TopArgs, client: &Client) -> Result<(), Failure> {
    if client.output.json {
        return Err(Failure::new("this view is text: `nvmfctl stats -o json` has its figures"));
    }
    let before = look(client).await?;
    if args.once {
        sleep(args.interval).await;
        let view = View::new(look(client).await?, &before, false);
        let columns = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
        client.output.print(&text(&view, columns.unwrap_or(COLUMNS).clamp(80, 500), lines(&view))?);
        return Ok(());
    }
    if !stdout().is_terminal() {
        return Err(Failure::new("stdout is no terminal: use --once, or `nvmfctl stats`"));
    }
    let mut terminal = ratatui::try_init().map_err(|error| unusable(&error))?;
    let outcome = live(&args, client, before, &mut terminal).await;
    ratatui::restore();
    outcome
}

async fn live(
    args: &TopArgs,
    client: &Client,
    mut before: Stats,
    terminal: &mut ratatui::DefaultTerminal,
) -> Result<(), Failure> {
    // The first view has the totals since the start, so that it is displayed immediately.
    let mut view = View::new(before.clone(), &Stats::default(), true);
    loop {
        terminal.draw(|frame| draw(frame, &view)).map_err(|error| unusable(&error))?;
        let period = args.interval;
        let quit = spawn_blocking(move || wants_to_quit(period)).await;
        if quit.is_ok_and(|quit| quit.unwrap_or(true)) {
            return Ok(());
        }
        let now = look(client).await?;
        view = View::new(now.clone(), &before, true);
        before = now;
    }
}

/// Waits for the next update; true if the user quits first.
fn wants_to_quit(period: Duration) -> std::io::Result<bool> {
    let until = std::time::Instant::now() + period;
    loop {
        let left = until.saturating_duration_since(std::time::Instant::now());
        if !event::poll(left)? {
            return Ok(false);
        }
        if let Event::Key(key) = event::read()? {
            let interrupt = key.modifiers == KeyModifiers::CONTROL;
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(true),
                KeyCode::Char('c') if interrupt => return Ok(true),
                _ => {}
            }
        } else if left.is_zero() {
            return Ok(false);
        }
    }
}

fn unusable(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(format!("the terminal cannot be used: {error}"))
}

impl View {
    fn new(now: Stats, before: &Stats, live: bool) -> View {
        View { uptime_us: now.at_us, since: now.since(before), live }
    }
}

/// Number of lines of a complete view.
fn lines(view: &View) -> u16 {
    let rows = by_row(&view.since).len().clamp(1, 1000) as u16;
    2 + (3 + rows).max(5) + lines_of_stages(&by_kind(&view.since)) + lines_of_reactors(&view.since)
}

fn lines_of_stages(kinds: &[Rate]) -> u16 {
    3 + kinds.len().max(1) as u16
}

fn lines_of_reactors(since: &Stats) -> u16 {
    3 + since.reactors.len().clamp(1, 8) as u16
}

/// Formats a view as text.
fn text(view: &View, columns: u16, lines: u16) -> Result<String, Failure> {
    let backend = TestBackend::new(columns, lines);
    let mut terminal = Terminal::new(backend).map_err(|error| unusable(&error))?;
    terminal.draw(|frame| draw(frame, view)).map_err(|error| unusable(&error))?;
    let buffer = terminal.backend().buffer();
    let cell = |x, y| buffer.cell((x, y)).map_or(" ", |cell| cell.symbol());
    let line = |y| (0..columns).map(|x| cell(x, y)).collect::<String>();
    Ok((0..lines).map(|y| line(y).trim_end().to_owned() + "\n").collect())
}

fn draw(frame: &mut Frame<'_>, view: &View) {
    let kinds = by_kind(&view.since);
    let areas = Layout::vertical([
        Constraint::Length(2),
        Constraint::Min(5),
        Constraint::Length(lines_of_stages(&kinds)),
        Constraint::Length(lines_of_reactors(&view.since)),
    ]);
    let [head, rows, stages, reactors] = areas.areas(frame.area());
    draw_head(frame, head, view);
    draw_rows(frame, rows, &by_row(&view.since));
    draw_stages(frame, stages, &kinds);
    draw_reactors(frame, reactors, &view.since);
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, view: &View) {
    let all = together(&view.since);
    let hosts: std::collections::BTreeSet<_> = view.since.rows.iter().map(|r| &r.host).collect();
    let first = format!(
        "nvmfd, up {}, {}   {} IOPS   {}/s   {:.1} under way   {} failed",
        duration(view.uptime_us / 1_000_000),
        count(hosts.len(), "host"),
        short(all.iops),
        bytes(all.bytes_per_s),
        all.depth,
        all.failures,
    );
    let times = all.latency;
    let latencies = format!(
        "latency: mean {}, 50 % {}, 99 % {}, 99.9 % {}",
        took(&all, times.mean_us),
        took(&all, times.p50_us),
        took(&all, times.p99_us),
        took(&all, times.p999_us),
    );
    let period = seconds(&view.since);
    let second = match view.live {
        true if area.width >= WIDE => format!("{latencies}   (of {period:.1} s; q leaves)"),
        true => format!("{latencies}   q leaves"),
        false => format!("{latencies}   (of {period:.1} s)"),
    };
    frame.render_widget(Paragraph::new(vec![Line::from(first).bold(), Line::from(second)]), area);
}

fn draw_rows(frame: &mut Frame<'_>, area: Rect, all: &[Rate]) {
    let figures = || FIGURES.iter().filter(|figure| area.width >= WIDE || !figure.extra);
    // The columns besides the two names: namespace id, figures and gaps.
    let taken = figures().map(|figure| figure.columns + 1).sum::<u16>() + 5 + 2;
    let names = area.width.saturating_sub(taken);
    let subsystem = names * 9 / 20;
    let host = names - subsystem;
    let heads = ["SUBSYSTEM", "NSID", "HOST"].into_iter().chain(figures().map(|f| f.head));
    let widths = [subsystem, 5, host].into_iter().chain(figures().map(|f| f.columns));
    let rows = all.iter().map(|rate| {
        let names =
            [end_of(&rate.subsystem, subsystem), rate.nsid.to_string(), end_of(&rate.host, host)];
        let row = Row::new(names.into_iter().chain(figures().map(|figure| (figure.of)(rate))));
        match (rate.failures > 0, rate.commands) {
            (true, _) => row.fg(Color::Red),
            (false, 0) => row.dim(),
            (false, _) => row,
        }
    });
    frame.render_widget(
        table("Namespaces and hosts", heads, rows, widths.map(Constraint::Length)),
        area,
    );
}

/// Formats a latency, if there were commands.
fn took(rate: &Rate, us: f64) -> String {
    if rate.commands == 0 { "-".to_owned() } else { time(us) }
}

fn draw_stages(frame: &mut Frame<'_>, area: Rect, kinds: &[Rate]) {
    let heads = ["OP", "IOPS", "MEAN", "P99", "WHERE THE TIME GOES"];
    let rows = kinds.iter().map(|rate| {
        let shares = rate.stages.iter().filter(|stage| stage.share >= 0.005);
        let share = |stage: &crate::derived_stats::Stage| {
            let share = format!("{} {:.0} %", stage.stage, stage.share * 100.0);
            match area.width >= WIDE {
                true => format!("{share} ({})", time(stage.latency.mean_us)),
                false => share,
            }
        };
        Row::new([
            rate.op.clone(),
            short(rate.iops),
            time(rate.latency.mean_us),
            time(rate.latency.p99_us),
            shares.map(share).collect::<Vec<_>>().join("   "),
        ])
    });
    let widths = [
        Constraint::Length(6),
        Constraint::Length(7),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Fill(1),
    ];
    frame.render_widget(table("Stages", heads, rows, widths), area);
}

fn draw_reactors(frame: &mut Frame<'_>, area: Rect, since: &Stats) {
    let heads = ["REACTOR", "LOAD", "", "QUEUES", "DATA IN USE", "WAIT", "LOOPS/S", "SLEEPS/S"];
    let row = |reactor: &Reactor| {
        let load = (reactor.busy_ns as f64 / 1e9 / seconds(since)).clamp(0.0, 1.0);
        let per_s = |count: u64| short(count as f64 / seconds(since));
        let used = reactor.data_bytes.saturating_sub(reactor.data_free_bytes);
        let (used, all) = (bytes(used as f64), bytes(reactor.data_bytes as f64));
        Row::new([
            Cell::from(reactor.index.to_string()),
            Cell::from(format!("{:.0} %", load * 100.0)),
            Cell::from(bar(load)).style(Style::new().fg(color(load))),
            Cell::from(reactor.queues.to_string()),
            Cell::from(format!("{used} of {all}")),
            Cell::from(reactor.waiting_for_buffer.to_string()),
            Cell::from(per_s(reactor.iterations)),
            Cell::from(per_s(reactor.sleeps)),
        ])
    };
    let widths = [
        Constraint::Length(7),
        Constraint::Length(5),
        Constraint::Length(20),
        Constraint::Length(6),
        Constraint::Length(22),
        Constraint::Length(5),
        Constraint::Length(8),
        Constraint::Length(8),
    ];
    frame.render_widget(table("Reactors", heads, since.reactors.iter().map(row), widths), area);
}

fn table<'a>(
    title: &'a str,
    heads: impl IntoIterator<Item = &'a str>,
    rows: impl Iterator<Item = Row<'a>>,
    widths: impl IntoIterator<Item = Constraint>,
) -> Table<'a> {
    Table::new(rows, widths)
        .header(Row::new(heads).bold())
        .column_spacing(1)
        .block(Block::new().borders(Borders::TOP).title(title))
}

/// Truncates a name to this number of columns: its end is kept.
fn end_of(name: &str, columns: u16) -> String {
    let (count, most) = (name.chars().count(), usize::from(columns));
    match count.checked_sub(most) {
        None | Some(0) => name.to_owned(),
        Some(over) => format!("..{}", name.chars().skip(over + 2).collect::<String>()),
    }
}

fn bar(load: f64) -> String {
    "#".repeat((load * 20.0).round() as usize)
}

fn color(load: f64) -> Color {
    match load {
        load if load >= 0.95 => Color::Red,
        load if load >= 0.75 => Color::Yellow,
        _ => Color::Green,
    }
}

#[cfg(test)]
mod tests {
    use nvmfd::api::stats::Operations;

    use crate::derived_stats::tests::stats;
    use crate::top::*;

    #[test]
    fn a_view_shows_hosts_latencies_stages_and_reactors() {
        let view = View { since: stats(), uptime_us: 3_700_000_000, live: true };
        let text = text(&view, 132, 20).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "nvmfd, up 1 h 1 min, 2 hosts   51.0k IOPS   199 MiB/s   15.0 under way   102 failed"
        );
        let line = |word: &str| *lines.iter().find(|line| line.contains(word)).expect(word);
        for word in ["nqn.2026-11.io.nvmfd:disk1", "50.0k", "195 MiB/s", "140 us", "7.0"] {
            assert!(line("host:busy").contains(word), "{word} in {}", line("host:busy"));
        }
        assert!(line("read").contains("disk 75 % (266 us)   reply 25 %"), "{text}");
        for word in ["75 %", "###############", "8.00 MiB of 32.0 MiB", "100k", "250"] {
            assert!(
                lines.iter().any(|line| line.starts_with("0 ") && line.contains(word)),
                "{text}"
            );
        }
    }

    #[test]
    fn a_daemon_without_hosts_has_a_view_as_well() {
        let view = View { since: Stats::default(), uptime_us: 5, live: false };
        assert!(text(&view, 80, 16).unwrap().starts_with("nvmfd, up 0 s, 0 hosts   0 IOPS"));
    }

    #[test]
    fn a_narrow_terminal_shows_fewer_figures_and_cuts_none() {
        let mut view = View { since: stats(), uptime_us: 3_700_000_000, live: true };
        let narrow = text(&view, 80, 20).unwrap();
        let lines: Vec<&str> = narrow.lines().collect();
        assert!(lines[1].ends_with("q leaves"), "{narrow}");
        assert!(narrow.contains("disk 75 %   reply 25 %"), "{narrow}");
        let heads = lines.iter().find(|line| line.starts_with("SUBSYSTEM")).unwrap();
        assert!(heads.contains("P99  ") && !heads.contains("P99.9"), "{narrow}");
        assert!(heads.ends_with("DEPTH") && lines.iter().any(|line| line.ends_with("7.0")));
        view.live = false;
        assert!(!text(&view, 80, 20).unwrap().contains("q leaves"));
    }

    #[test]
    fn output_printed_once_has_every_row_and_no_blank_padding() {
        let mut since = stats();
        let first = since.rows[0].clone();
        since.rows.extend((0..60).map(|i| {
            let mut row = first.clone();
            row.host = format!("host:{i}");
            row
        }));
        let view = View { since, uptime_us: 5, live: false };
        let text = text(&view, 132, super::lines(&view)).unwrap();
        assert!((0..60).all(|i| text.contains(&format!("host:{i} "))), "{text}");
        assert!(!text.contains("\n\n\n"), "{text}");
    }

    #[test]
    fn a_row_without_commands_has_no_latencies() {
        let mut since = stats();
        for op in since.rows.iter_mut().flat_map(|row| &mut row.ops) {
            *op = Operations { op: op.op.clone(), ..Operations::default() };
        }
        let text = text(&View { since, uptime_us: 5, live: false }, 132, 20).unwrap();
        assert!(text.lines().nth(1).unwrap().starts_with("latency: mean -, 50 % -"), "{text}");
        assert!(!text.contains(" us"), "{text}");
    }

    #[test]
    fn long_names_are_cut_at_their_beginning() {
        let name = "nqn.2014-08.org.nvmexpress:uuid:2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11";
        assert_eq!(end_of(name, 20), "..-9d68-0d6c2f3b5a11");
        assert_eq!((end_of("short", 5), end_of("short", 0)), ("short".into(), "..".into()));
    }
}
