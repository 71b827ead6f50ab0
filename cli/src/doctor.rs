//! `kolo doctor`: checks whether kolo works on this machine, and says what to do if it does not. With `--hosts`,
//! it measures the links between hosts.

use std::io::{BufRead, BufReader, Read};
use std::process::{self, Child, ExitCode, Stdio};

use clap::Args as ClapArgs;
use kolo::Communicator;
use kolo::doctor::{Finding, HostLinks, MOST_HOSTS, Severity, examine, host_links, launched_by, of_reading, read_word};
use serde_json::json;

use crate::run::{self, once_each};
use crate::table::say_wrapped;
use crate::units::count;
use crate::{Command, Failure, parse, say, show};

/// Arguments of `kolo doctor`.
#[derive(ClapArgs)]
pub(crate) struct Args {
    /// Measure the link between each two of these hosts, and name the slow ones. Like `kolo run`, starts
    /// one rank per host over ssh
    #[arg(long, short = 'H', value_name = "HOSTS")]
    hosts: Option<String>,
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
    /// Run as a rank that measures links
    #[arg(long, hide = true)]
    links: bool,
    /// Run as a process whose memory is read: print its pid, the address of a word, and the word
    #[arg(long, hide = true)]
    expose: bool,
    /// Run as a process that reads: the pid of another process, an address there, and the expected
    /// word
    #[arg(long, hide = true, num_args = 3, value_names = ["PID", "ADDRESS", "WORD"])]
    read: Option<Vec<u64>>,
}

pub(crate) fn doctor(args: &Args) -> ExitCode {
    if args.expose {
        return expose();
    }
    if let Some(read) = &args.read {
        return read_exposed(read);
    }
    if let Some(hosts) = &args.hosts {
        return start_on(hosts, args.json);
    }
    if args.links {
        return measure(args.json).unwrap_or_else(Failure::report);
    }
    let mut findings = examine();
    findings.push(of_reading(&try_reading()));
    let works = findings.iter().all(|finding| finding.severity != Severity::Failure);
    // With wrong settings, a job would only report the same findings again.
    if works {
        findings.push(try_a_job());
    }
    let failures = findings.iter().filter(|finding| finding.severity == Severity::Failure).count();
    if args.json {
        print_json(&findings, failures);
    } else {
        print(&findings, failures);
    }
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Starts a rank on each host, which measures the links.
fn start_on(hosts: &str, json: bool) -> ExitCode {
    let hosts = match once_each(hosts) {
        Ok(hosts) => hosts,
        Err(problem) => return Failure::Usage(problem).report(),
    };
    // The findings say what the log would.
    let quiet = if std::env::var_os("KOLO_LOG").is_none() { &["-x", "KOLO_LOG=error"][..] } else { &[] };
    let words = [&["kolo", "run", "--no-prefix", "--hosts", &*hosts], quiet, &["--", "doctor", "--links"]].concat();
    match parse(words.into_iter().chain(json.then_some("--json"))) {
        Ok(cli) => match cli.command {
            Command::Run(args) => run::run(&args),
            _ => unreachable!("the words are those of kolo run"),
        },
        Err(error) => show(&error),
    }
}

/// Measures the links between the hosts of the job of which this process is a rank. Rank 0 prints them.
fn measure(json: bool) -> Result<ExitCode, Failure> {
    let failed = |error: kolo::Error| Failure::Other(error.to_string());
    if launched_by().is_none() {
        return Err(Failure::Usage("--links is for ranks: write kolo doctor --hosts a,b".to_owned()));
    }
    let comm = Communicator::from_env().map_err(failed)?;
    let count = comm.host_count();
    if count > MOST_HOSTS {
        return Err(Failure::Other(format!("{count} hosts are too many to measure each two of them: give at most {MOST_HOSTS}")));
    }
    let measured = host_links(&comm).map_err(failed)?;
    if comm.rank() > 0 {
        return Ok(ExitCode::SUCCESS);
    }
    let Some(measured) = measured else {
        return Err(Failure::Other(match count {
            1 => "all ranks are on one host, which has no links to measure".to_owned(),
            _ => "the links cannot be measured: ranks of one machine count as several hosts, or a message takes too long"
                .to_owned(),
        }));
    };
    if json {
        print_links_as_json(&measured);
    } else {
        print_links(&measured);
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the rates of all links, and what is wrong with them.
fn print_links(HostLinks { hosts, links, order, findings, .. }: &HostLinks) {
    let widest = hosts.iter().map(|host| host.chars().count()).max().unwrap_or(0);
    let at = |host: usize| host + 1;
    let numbers: String = (0..hosts.len() - 1).map(|host| format!("{:>7}", at(host))).collect();
    say(&format!("{:widest$}    {numbers}  Gb/s", ""));
    for (host, name) in hosts.iter().enumerate() {
        let rates = links.iter().filter(|link| link.hosts[1] == host);
        let shown = |rate: Option<f64>| rate.map_or_else(|| "?".to_owned(), |rate| format!("{:.3}", 8e-9 * rate));
        let rates: String = rates.map(|link| format!("{:>7}", shown(link.bytes_per_second))).collect();
        say(format!("{:>2} {name:widest$} {rates}", at(host)).trim_end());
    }
    say("");
    findings.iter().for_each(print_finding);
    let order: Vec<String> = order.iter().map(|&host| at(host).to_string()).collect();
    if !order.is_empty() {
        say_wrapped(&format!("{:<8} {:<18} ", name(Severity::Fine), "order"), &format!("schedules visit {}", order.join(", ")));
    }
}

fn print_links_as_json(HostLinks { hosts, links, order, findings, .. }: &HostLinks) {
    let links: Vec<_> = links
        .iter()
        .map(|link| {
            let [a, b] = link.hosts.map(|host| &hosts[host]);
            json!({"hosts": [a, b], "latency_s": link.latency, "bytes_per_s": link.bytes_per_second})
        })
        .collect();
    let order: Vec<&String> = order.iter().map(|&host| &hosts[host]).collect();
    let findings: Vec<_> = findings.iter().map(of_finding).collect();
    let all = json!({"kolo": env!("CARGO_PKG_VERSION"), "links": links, "order": order, "findings": findings});
    say(&format!("{all:#}"));
}

fn name(severity: Severity) -> &'static str {
    match severity {
        Severity::Fine => "ok",
        Severity::Warning => "warning",
        Severity::Failure => "FAILURE",
    }
}

fn print(findings: &[Finding], failures: usize) {
    findings.iter().for_each(print_finding);
    say(&match failures {
        0 => "kolo works here".to_owned(),
        _ => format!("kolo does not work here like this: {}", count(failures, "failure")),
    });
}

fn print_finding(Finding { subject, severity, found, advice, .. }: &Finding) {
    // One line for each finding.
    let found = found.split_whitespace().collect::<Vec<_>>().join(" ");
    say_wrapped(&format!("{:<8} {subject:<18} ", name(*severity)), &found);
    if let Some(advice) = advice {
        say_wrapped(&format!("{:<8} {:<18} -> ", "", ""), advice);
    }
}

fn of_finding(Finding { subject, severity, found, advice, .. }: &Finding) -> serde_json::Value {
    json!({"subject": subject, "severity": name(*severity).to_lowercase(), "found": found, "advice": advice})
}

fn print_json(findings: &[Finding], failures: usize) {
    let list: Vec<_> = findings.iter().map(of_finding).collect();
    say(&format!("{:#}", json!({"kolo": env!("CARGO_PKG_VERSION"), "failures": failures, "findings": list})));
}

/// Returns a command that runs this program.
fn this(arguments: &[&str]) -> Result<process::Command, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program cannot be found: {error}"))?;
    let mut command = process::Command::new(program);
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Ok(command)
}

/// Tries whether a process can read the memory of another one. Neither has started the other, as
/// with ranks.
fn try_reading() -> Result<(), String> {
    let failed = |error: std::io::Error| format!("it cannot be tried: {error}");
    let mut owner = Ended(this(&["doctor", "--expose"])?.spawn().map_err(failed)?);
    let mut line = String::new();
    let pipe = owner.0.stdout.take().ok_or("it cannot be tried: a process has no output")?;
    BufReader::new(pipe).read_line(&mut line).map_err(failed)?;
    let arguments: Vec<&str> = ["doctor", "--read"].into_iter().chain(line.split_whitespace()).collect();
    let output = this(&arguments)?.stdin(Stdio::null()).output().map_err(failed)?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).trim().to_owned()) }
}

/// Ends a process when it is dropped.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        // The process ends at the end of its standard input.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn expose() -> ExitCode {
    let word = Box::new(u64::from(process::id()) ^ 0x6b6f_6c6f_6b6f_6c6f);
    say(&format!("{} {} {}", process::id(), (&raw const *word).expose_provenance(), *word));
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    drop(word);
    ExitCode::SUCCESS
}

fn read_exposed(read: &[u64]) -> ExitCode {
    let [pid, address, word] = read else { return ExitCode::FAILURE };
    match read_word(*pid as u32, *address) {
        Ok(found) if found == *word => ExitCode::SUCCESS,
        Ok(_) => {
            eprintln!("something else was read");
            ExitCode::FAILURE
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// How long the job may take to start, and each of its operations.
const PATIENCE: &str = "20s";

/// A job of two ranks, as a user would start one.
fn try_a_job() -> Finding {
    const SUBJECT: &str = "a job";
    let bench = ["run", "-n", "2", "--", "bench", "all_reduce", "--sizes", "8", "--iters", "5", "--warmup", "1", "--check"];
    let output = this(&bench).and_then(|mut command| {
        command.stdin(Stdio::null()).env("KOLO_START_TIMEOUT", PATIENCE).env("KOLO_TIMEOUT", PATIENCE);
        // The first line is the error.
        command.env("KOLO_LOG", "off");
        command.output().map_err(|error| error.to_string())
    });
    let advice =
        "if all else is well here, this is a defect of kolo's; KOLO_LOG=debug kolo run -n 2 -- bench all_reduce says more";
    match output {
        Ok(output) if output.status.success() => {
            let out = String::from_utf8_lossy(&output.stdout);
            let head = out.lines().next().unwrap_or_default().trim_start_matches(['#', ' ']).to_owned();
            Finding::fine(SUBJECT, format!("two ranks have met and computed: {head}"))
        }
        Ok(output) => {
            let error = String::from_utf8_lossy(&output.stderr);
            Finding::failure(SUBJECT, format!("two ranks have failed: {}", error.lines().next().unwrap_or_default()), advice)
        }
        Err(error) => Finding::failure(SUBJECT, format!("two ranks cannot be started: {error}"), advice),
    }
}
