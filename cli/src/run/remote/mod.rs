//! Ranks on several hosts: ssh starts an agent on each, which starts the ranks there.
//!
//! The description of the job, with its secret, goes over the agent's standard input, so that no
//! command line and no environment of ssh shows it. No rank starts before all hosts are ready. If
//! the connection ends, the agent ends its ranks.

pub(super) mod agent;
mod connection;
mod environment;
mod hostfile;
mod hosts;
mod protocol;
mod ssh;
mod window;

use std::ffi::OsString;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, after, bounded, select, unbounded};
use kolo::TcpStoreServer;

use super::arguments::Args;
use super::attempt::{Attempt, Ended, Events, Refusal};
use super::cause::Member;
use super::failures::{Names, names};
use super::output::Palette;
use super::process::{Event, Signal};
use super::program::Program;
use super::supervise::{Failure, Ranks, Supervisor};
use super::{Credentials, after_the_output, exported};
use crate::complain;
use crate::random::hexadecimal;
use crate::units::show_ranks;
use connection::{Advice, Connection, Notes, Receivers};
pub(super) use hosts::Host;
pub(crate) use hosts::once_each;
use hosts::{Placed, is_this_machine};
use protocol::{Job, ToAgent};
use ssh::{Ssh, remote_word};

/// How often the agents are told that the launcher lives.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// How long the other hosts may take to answer after one has failed, so that all failures are
/// reported together.
const OTHER_FAILURES: Duration = Duration::from_secs(2);

/// How long a name server may take.
const NAME_SERVER: Duration = Duration::from_secs(10);

/// Returns the hosts that the arguments name; `None` for a job on this machine.
pub(super) fn hosts(args: &Args) -> Result<Option<Vec<Host>>, String> {
    let found = match (&args.hosts, &args.hostfile) {
        (Some(list), _) => hosts::parse(list)?,
        (None, Some(file)) => hostfile::read(file)?,
        (None, None) => return Ok(None),
    };
    if cfg!(windows) {
        return Err("--hosts and --hostfile work on Linux and macOS; start the job there".to_owned());
    }
    Ok(Some(found))
}

/// Starts ranks on hosts, and waits for them. Hosts that cannot start ranks are left out, if the others
/// have enough slots.
pub(super) fn launch(attempt: &Attempt<'_>, hosts: &[Host]) -> Result<Ended, Refusal> {
    let args = attempt.args;
    let mut hosts = hosts.to_vec();
    let program = Program::new(&args.program)?;
    let exported = exported(&args.exported)?.into_iter().chain(attempt.variables()).collect();
    let environment = environment::forwarded(exported);
    let directory = args.directory.clone().map_or_else(environment::directory, Ok);
    let directory = directory.map_err(|error| format!("cannot find the working directory: {error}; give --directory"))?;
    let agents = Agents::new(args, Ssh::parse(&args.ssh)?)?;
    loop {
        let placed = hosts::place(&hosts, args.ranks)?;
        let count = placed.last().map_or(0, |last| last.ranks.end);
        attempt.check(&program, count, false)?;
        let palette = attempt.palette(&program, count)?;
        let started = match start(attempt, &agents, placed, &palette, (&environment, &directory))? {
            Ok(started) => started,
            Err(NotReady::Stopped(signal)) => {
                return Ok(Ended { failure: Some(Failure::Stopped(signal)), palette, ranks: count });
            }
            Err(NotReady::Hosts(problems)) => {
                let others: Vec<Host> =
                    hosts.iter().filter(|host| problems.iter().all(|(silent, _)| *silent != host.name)).cloned().collect();
                let slots: u32 = others.iter().map(|host| host.slots).sum();
                let is_enough = args.ranks.is_some_and(|ranks| ranks.least < ranks.most && ranks.least <= slots);
                let them = if problems.len() == 1 { "it" } else { "them" };
                let said = problems.into_iter().map(|(_, problem)| problem).collect::<Vec<_>>().join("\nkolo run: ");
                if !is_enough {
                    return Err(said.into());
                }
                complain(&format!("kolo run: {said}; the other hosts start without {them}"));
                hosts = others;
                continue;
            }
        };
        let Started { ranks, events, server, all_read, sends_input } = started;
        if sends_input && let Some(connection) = ranks.connections.first() {
            send_input(connection);
        }
        let mut supervisor = Supervisor::new(ranks, args.grace(), args.kill_after);
        let failure = supervisor.wait(&events.receiver);
        drop(server);
        let failure = after_the_output(failure, &all_read, &events.receiver);
        return Ok(Ended { failure, palette, ranks: count });
    }
}

/// Ranks that were told to start on their hosts.
struct Started {
    ranks: RemoteRanks,
    events: Events,
    server: TcpStoreServer,
    /// Closed when all output was written.
    all_read: Receiver<()>,
    /// Whether rank 0 reads what the launcher reads.
    sends_input: bool,
}

/// Starts the agents of hosts, and the ranks when all agents are ready.
fn start(
    attempt: &Attempt<'_>,
    agents: &Agents,
    placed: Vec<Placed>,
    palette: &Palette,
    (environment, directory): (&[(OsString, OsString)], &Path),
) -> Result<Result<Started, NotReady>, Refusal> {
    let args = attempt.args;
    let count = placed.last().map_or(0, |last| last.ranks.end);
    let credentials = Credentials::new()?;
    let address = address(args, &agents.ssh, &placed)?;
    let server = TcpStoreServer::bind(address, &credentials.job, Some(credentials.secret));
    let server = server.map_err(|error| not_served(args, &error))?;
    let events = attempt.events()?;
    let (unread, all_read) = bounded(0);
    let (answers, answer) = unbounded();
    let notes = Arc::new(Notes::default());
    let receivers = Receivers { palette: palette.clone(), events: events.sender.clone(), answers, notes: notes.clone(), unread };
    let mut ranks = RemoteRanks { connections: Vec::new(), hosts: Vec::new(), notes };
    let reads = attempt.reads_input();
    for (index, Placed { host, ranks: of_host }) in placed.into_iter().enumerate() {
        let job = Job {
            name: credentials.job.clone(),
            host: index,
            secret: hexadecimal(&credentials.secret),
            store: server.address(),
            world_size: count,
            first: of_host.start,
            ranks: of_host.len(),
            directory: directory.as_os_str().to_owned(),
            environment: environment.to_vec(),
            program: args.program.clone(),
            has_input: reads && of_host.start == 0,
            keep_going: args.keep_going,
            bind_to: args.bind_to,
            report_bindings: args.report_bindings,
            has_nccl: args.nccl,
        };
        ranks.hosts.extend(of_host.clone().map(|_| Some(index)));
        let connection = agents.open(index, &host, of_host, receivers.clone());
        let told = connection.and_then(|connection| {
            connection.tell(&ToAgent::Job(Box::new(job))).map_err(|error| error.to_string())?;
            Ok(connection)
        });
        match told {
            Ok(connection) => ranks.connections.push(connection),
            Err(problem) => {
                ranks.close();
                return Err(format!("cannot start ranks on host {host}: {problem}").into());
            }
        }
    }
    drop(receivers);
    ranks.send_heartbeats();
    match ranks.wait_until_ready(&answer, &events.receiver, args.connect_timeout) {
        Ok(master) => {
            ranks.tell(&ToAgent::Start { master });
            palette.begin();
            Ok(Ok(Started { ranks, events, server, all_read, sends_input: reads }))
        }
        Err(not_ready) => {
            ranks.close();
            Ok(Err(not_ready))
        }
    }
}

/// Sends what this process reads to rank 0.
fn send_input(connection: &Connection) {
    let mut send = connection.input();
    let copy = move || {
        let mut part = vec![0; 16 << 10];
        loop {
            // An error counts as the end of the input.
            let read = std::io::stdin().read(&mut part).unwrap_or(0);
            if !send(&part[..read]) || read == 0 {
                return;
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("input".to_owned()).spawn(copy) {
        complain(&format!("kolo run: rank 0 has no input: {error}"));
    }
}

/// Chooses where the hosts reach the store: an address that is given, or by the route to the first
/// host that is another machine.
fn address(args: &Args, ssh: &Ssh, placed: &[Placed]) -> Result<SocketAddr, String> {
    if let Some(given) = args.address {
        if given.ip().is_unspecified() {
            return Err(format!("--address {}: give the address that the hosts connect to", given.ip()));
        }
        return Ok(given);
    }
    let mut chosen = None;
    for Placed { host, .. } in placed.iter().filter(|placed| !is_this_machine(&placed.host)) {
        let name = ssh.host_name(host).unwrap_or_else(|| host.rsplit_once('@').map_or(&**host, |(_, host)| host).to_owned());
        let found = kolo::settings::address_for(&name, NAME_SERVER).map_err(|error| error.to_string())?;
        let is_other = !found.is_loopback();
        chosen.get_or_insert(found);
        if is_other {
            chosen = Some(found);
            break;
        }
    }
    Ok(SocketAddr::new(chosen.unwrap_or(IpAddr::from([127, 0, 0, 1])), 0))
}

/// Says why the store cannot be served where `--address` says.
fn not_served(args: &Args, error: &kolo::Error) -> String {
    let (Some(given), kolo::Error::Store { problem, .. }) = (args.address, error) else { return error.to_string() };
    // Port 0 was not given.
    let given = if given.port() == 0 { given.ip().to_string() } else { given.to_string() };
    match problem {
        kolo::StoreError::PortTaken { holder, .. } => {
            let holder = holder.as_deref().unwrap_or("another process");
            format!("--address {given}: the port is taken by {holder}; give another port, or none, and the system chooses one")
        }
        problem => format!("--address {given}: {problem}; give an address of this machine, and a port that this user may open"),
    }
}

/// How agents are started.
struct Agents {
    ssh: Ssh,
    /// This program.
    here: OsString,
    /// The program on other hosts, as a word of their shell.
    there: String,
    connect_timeout: Duration,
}

impl Agents {
    fn new(args: &Args, ssh: Ssh) -> Result<Agents, String> {
        let here = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
        let given = args.remote_program.as_deref().filter(|path| !path.is_empty());
        let there = given.or(here.to_str()).ok_or_else(|| format!("{}: give --remote-program", here.display()))?;
        let there = remote_word(there)?;
        Ok(Agents { ssh, here: here.into_os_string(), there, connect_timeout: args.connect_timeout })
    }

    /// Starts the agent of a host, over ssh unless the host is this machine.
    fn open(&self, index: usize, host: &str, ranks: std::ops::Range<usize>, receivers: Receivers) -> Result<Connection, String> {
        let is_remote = !is_this_machine(host);
        let command = if is_remote {
            self.ssh.command(host, &format!("{} agent", self.there), self.connect_timeout)
        } else {
            let mut command = Command::new(&self.here);
            command.arg("agent");
            command
        };
        let connection = self.ssh.check(host, "true");
        let program = self.ssh.check(host, &format!("{} --version", self.there));
        let advice = Advice { is_remote, connection, program };
        Connection::open(index, host.into(), ranks, command, advice, receivers).map_err(|error| match is_remote {
            true => format!("{} cannot be started: {error}; install ssh, or give it with --ssh", self.ssh.program()),
            false => error.to_string(),
        })
    }
}

/// The ranks on all hosts.
struct RemoteRanks {
    connections: Vec<Connection>,
    /// The host of each rank, by its number; `None` for ranks that have ended.
    hosts: Vec<Option<usize>>,
    notes: Arc<Notes>,
}

/// Why the hosts cannot start ranks.
enum NotReady {
    Stopped(Signal),
    /// The hosts that cannot start ranks, and why.
    Hosts(Vec<(String, String)>),
}

impl RemoteRanks {
    /// Waits until all hosts are ready. Returns the address of the first.
    fn wait_until_ready(
        &self,
        answers: &Receiver<(usize, Result<SocketAddr, String>)>,
        events: &Receiver<Event>,
        timeout: Duration,
    ) -> Result<SocketAddr, NotReady> {
        let mut first = None;
        let mut deadline = Instant::now() + timeout;
        let mut silent: Vec<usize> = (0..self.connections.len()).collect();
        let mut problems = Vec::new();
        while !silent.is_empty() {
            select! {
                recv(answers) -> answer => {
                    let Ok((host, answer)) = answer else { break };
                    silent.retain(|other| *other != host);
                    match answer {
                        Ok(master) if host == 0 => first = Some(master),
                        Ok(_) => {}
                        Err(problem) => {
                            problems.push((host, problem));
                            deadline = deadline.min(Instant::now() + OTHER_FAILURES);
                        }
                    }
                },
                recv(events) -> event => match event {
                    Ok(Event::Signalled(signal)) if signal.ends() => return Err(NotReady::Stopped(signal)),
                    Ok(Event::Lost(host, why)) => problems.push((host, why)),
                    _ => {}
                },
                recv(after(deadline.saturating_duration_since(Instant::now()))) -> _ => break,
            }
        }
        if problems.is_empty() {
            let seconds = timeout.as_secs_f64();
            let late = |&index: &usize| {
                let host = &self.connections[index].host;
                let advice = "check that ssh connects, or give --connect-timeout";
                (index, format!("cannot start ranks on host {host}: no answer within {seconds} s; {advice}"))
            };
            problems = silent.iter().map(late).collect();
        }
        problems.sort_unstable();
        let named = |(index, problem): (usize, String)| (self.connections[index].host.to_string(), problem);
        let problems: Vec<(String, String)> = problems.into_iter().map(named).collect();
        first.filter(|_| problems.is_empty()).ok_or(NotReady::Hosts(problems))
    }

    fn tell(&self, what: &ToAgent) {
        // If an agent is gone, the thread that reads its answers says so.
        self.connections.iter().for_each(|connection| _ = connection.tell(what));
    }

    fn close(&self) {
        self.connections.iter().for_each(Connection::close);
    }

    fn send_heartbeats(&self) {
        let beats: Vec<_> = self.connections.iter().map(Connection::heartbeat).collect();
        let beat = move || {
            while beats.iter().filter(|beat| beat()).count() > 0 {
                std::thread::sleep(HEARTBEAT);
            }
        };
        if let Err(error) = std::thread::Builder::new().name("heartbeat".to_owned()).spawn(beat) {
            tracing::warn!(%error, "the agents will end the ranks, because they do not hear from this launcher");
        }
    }

    fn member(&self, rank: usize, host: usize) -> Member {
        Member { rank, pid: self.notes.pid(rank), host: Some(self.connections[host].host.clone()) }
    }

    /// Returns the hosts with ranks that run.
    fn busy(&self) -> impl Iterator<Item = (usize, &Connection)> {
        let is_busy = |host: usize| self.hosts.contains(&Some(host));
        self.connections.iter().enumerate().filter(move |(host, _)| is_busy(*host))
    }
}

impl Ranks for RemoteRanks {
    const PATIENCE: Option<Duration> = Some(Duration::from_secs(10));

    fn running(&self) -> Vec<usize> {
        (0..self.hosts.len()).filter(|rank| self.hosts[*rank].is_some()).collect()
    }

    fn signal(&self, signal: Signal) {
        self.busy().for_each(|(_, connection)| _ = connection.tell(&ToAgent::Signal(signal.to_string())));
    }

    fn ended(&mut self, rank: usize, _: bool) -> Option<Member> {
        let host = self.hosts[rank].take()?;
        Some(self.member(rank, host))
    }

    fn failed(&self) {
        self.tell(&ToAgent::Failed);
    }

    fn lost(&mut self, host: usize) -> Vec<Member> {
        let lost: Vec<usize> = (0..self.hosts.len()).filter(|rank| self.hosts[*rank] == Some(host)).collect();
        lost.iter().for_each(|rank| self.hosts[*rank] = None);
        lost.into_iter().map(|rank| self.member(rank, host)).collect()
    }

    fn names(&self) -> Names {
        names(&self.notes.reports(), self.hosts.len())
    }

    fn abandon(&mut self) {
        for (host, connection) in self.busy() {
            let ranks: Vec<usize> = (0..self.hosts.len()).filter(|rank| self.hosts[*rank] == Some(host)).collect();
            let host = &connection.host;
            complain(&format!(
                "kolo run: host {host} does not confirm the end of {}; look there for processes",
                show_ranks(&ranks)
            ));
            connection.kill();
        }
        self.hosts.fill(None);
    }
}
