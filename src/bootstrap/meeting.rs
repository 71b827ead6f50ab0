//! How ranks meet in a store: cards, the book, and which ranks share a host. See [`super`] for the protocol.

use std::time::{Duration, Instant};

use super::Start;
use super::card::{Book, Card, Refusal};
use crate::config::{self, SharedSettings};
use crate::door::handshake::{Hello, Purpose, random};
use crate::door::{self, Door};
use crate::error::{Error, Result, StoreProblem};
use crate::types::Rank;
use crate::wire::{Reader, Writer};

/// How long to wait for one key before looking whether the generation has changed.
const GLANCE: Duration = Duration::from_millis(300);

/// How much later than rank 0 the others give up, so that they hear its reason.
const GRACE: Duration = Duration::from_secs(2);

/// Exchanges cards: returns the generation, all cards, and the settings of rank 0.
pub(super) fn meet(start: &Start<'_>, door: &Door, card: &Card, began: Instant) -> Result<(String, Vec<Card>, SharedSettings)> {
    let (generation, book) = if start.rank == 0 { collect(start, door, card, began)? } else { join(start, door, card, began)? };
    if let (Book::Refused(_), true) = (&book, start.rank != 0) {
        store_error(start, start.store.set(&format!("{generation}/heard/{}", start.rank), &[], GRACE))?;
    }
    match book {
        Book::Members { cards, settings } => Ok((generation, cards, settings)),
        Book::Refused(refusal) => Err(refusal.error(&start.store.url())),
    }
}

fn store_error<T>(start: &Start<'_>, result: Result<T, StoreProblem>) -> Result<T> {
    result.map_err(|problem| problem.at(start.store.url()))
}

fn left(start: &Start<'_>) -> Duration {
    start.deadline.saturating_duration_since(Instant::now())
}

/// What rank 0 does.
fn collect(start: &Start<'_>, door: &Door, mine: &Card, began: Instant) -> Result<(String, Book)> {
    let generation = format!("{:016x}", u128::from_le_bytes(random()) as u64);
    let announced = match start.store.is_private() && !start.identity.has_secret() {
        true => {
            let secret = super::random_secret();
            door.share_secret(secret);
            secret.iter().fold(format!("{generation}."), |text, byte| text + &format!("{byte:02x}"))
        }
        false => generation.clone(),
    };
    let patience = left(start).max(GLANCE);
    store_error(start, start.store.set("generation", announced.as_bytes(), patience))?;
    store_error(start, start.store.claim(&format!("{generation}/rank/0"), &mine.encode(), patience))?;
    let mut cards: Vec<Option<Card>> = vec![None; start.world_size];
    cards[0] = Some(mine.clone());
    let book = 'book: loop {
        let missing: Vec<Rank> = (0..start.world_size).filter(|&rank| cards[rank].is_none()).collect();
        let Some(&first) = missing.first() else {
            let settings = start.settings.shared;
            break Book::Members { cards: cards.into_iter().flatten().collect(), settings };
        };
        if left(start).is_zero() {
            let waited = began.elapsed();
            break Book::Refused(Refusal::Missing { ranks: missing, world_size: start.world_size, waited });
        }
        // The first is waited for; what of the others is there is taken along, so that disagreements show at once.
        for &rank in &missing {
            let patience = if rank == first { GLANCE.min(left(start)) } else { Duration::ZERO };
            let bytes = store_error(start, start.store.get(&format!("{generation}/rank/{rank}"), patience))?;
            let card = bytes.and_then(|bytes| Card::decode(&bytes)).filter(|card| card.rank == rank);
            if card.as_ref().is_some_and(|card| !door.identity().may_listen() && card.is_elsewhere(mine)) {
                break 'book Book::Refused(Refusal::NoSecret);
            }
            if let Some(other) = card.as_ref().filter(|card| mine.disagreement(card).is_some()) {
                break 'book Book::Refused(Refusal::Disagrees { other: Box::new(other.clone()), zero: Box::new(mine.clone()) });
            }
            cards[rank] = card;
        }
        let current = store_error(start, start.store.get("generation", Duration::ZERO))?;
        if let Some(other) = current.filter(|current| *current != announced.as_bytes()) {
            let (other, _) = parse(&other);
            let second = store_error(start, start.store.get(&format!("{other}/rank/0"), GLANCE))?;
            let second =
                second.and_then(|bytes| Card::decode(&bytes)).map_or_else(|| "another process".to_owned(), |card| card.who());
            return Err(Error::RankTaken { rank: 0, first: mine.who(), second });
        }
    };
    store_error(start, start.store.set(&format!("{generation}/book"), &book.encode(), GRACE))?;
    if let Book::Refused(refusal) = &book {
        // The store may end with this process: the others shall read why before it does.
        let absent = if let Refusal::Missing { ranks, .. } = refusal { &ranks[..] } else { &[] };
        let until = Instant::now() + GRACE;
        for rank in (1..start.world_size).filter(|rank| !absent.contains(rank)) {
            let patience = until.saturating_duration_since(Instant::now());
            store_error(start, start.store.get(&format!("{generation}/heard/{rank}"), patience))?;
        }
    }
    Ok((generation, book))
}

/// What the others do.
fn join(start: &Start<'_>, door: &Door, mine: &Card, began: Instant) -> Result<(String, Book)> {
    let deadline = start.deadline + GRACE;
    let is_late = || Instant::now() >= deadline;
    let mut generation: Option<String> = None;
    let mut conflict: Option<(Card, Instant)> = None;
    loop {
        let current = match start.store.get("generation", GLANCE) {
            // A file that another job has left: rank 0 will make it this job's.
            Err(StoreProblem::OtherJob { .. }) if !is_late() => continue,
            current => store_error(start, current)?,
        };
        let current = current.map(|bytes| parse(&bytes));
        if let Some((found, secret)) = current.filter(|(found, _)| generation.as_ref() != Some(found)) {
            if let Some(secret) = secret.filter(|_| !start.identity.has_secret()) {
                door.share_secret(secret);
            }
            let key = format!("{found}/rank/{}", start.rank);
            let holder = store_error(start, start.store.claim(&key, &mine.encode(), left(start).max(GLANCE)))?;
            let holder = Card::decode(&holder).filter(|holder| holder.instance != mine.instance);
            conflict = holder.map(|holder| (holder, Instant::now()));
            generation = Some(found);
        }
        if let Some((holder, since)) = &conflict {
            // Either a living process has this rank, or the generation is a former run's and will change when rank 0 comes.
            if is_late() || since.elapsed() >= CONFLICT_PATIENCE && answers(start, door, holder) {
                return Err(Error::RankTaken { rank: start.rank, first: holder.who(), second: mine.who() });
            }
            std::thread::sleep(Duration::from_millis(10));
            continue;
        }
        if let Some(generation) = &generation {
            let bytes = store_error(start, start.store.get(&format!("{generation}/book"), GLANCE))?;
            match bytes.and_then(|bytes| Book::decode(&bytes)) {
                Some(Book::Members { cards, .. }) if cards.len() != start.world_size => {
                    let theirs = cards.len();
                    let host = cards.first().map_or_else(String::new, |card| card.host.clone());
                    return Err(Error::WorldSize { rank: 0, host, theirs, my_rank: start.rank, mine: start.world_size });
                }
                Some(Book::Members { cards, settings }) if cards[start.rank].instance == mine.instance => {
                    return Ok((generation.clone(), Book::Members { cards, settings }));
                }
                Some(Book::Refused(Refusal::Disagrees { other, zero }))
                    if zero.disagreement(mine).is_some() || zero.world_size == mine.world_size =>
                {
                    return Ok((generation.clone(), Book::Refused(Refusal::Disagrees { other, zero })));
                }
                Some(book @ Book::Refused(Refusal::Missing { .. } | Refusal::NoSecret)) => return Ok((generation.clone(), book)),
                // A former run's.
                _ => {}
            }
        }
        if is_late() {
            return Err(Error::Missing {
                ranks: missing(start, generation.as_deref()),
                world_size: start.world_size,
                store: start.store.url(),
                waited: began.elapsed(),
            });
        }
    }
}

/// The name of a generation, and the secret of its ranks if they were given none, as rank 0 announces them.
fn parse(announced: &[u8]) -> (String, Option<[u8; 32]>) {
    let text = String::from_utf8_lossy(announced);
    match text.split_once('.') {
        Some((generation, secret)) => (generation.to_owned(), config::secret(secret)),
        None => (text.into_owned(), None),
    }
}

/// How long a rank that finds its place taken waits before it looks who holds it: a former run may be about to end.
const CONFLICT_PATIENCE: Duration = Duration::from_millis(700);

/// Whether the process that wrote a card lives: its door opens for this job.
fn answers(start: &Start<'_>, own: &Door, holder: &Card) -> bool {
    let hello = Hello::new(Purpose::Probe, 0, start.rank, holder.rank);
    door::dial(holder.address, &own.identity(), &hello, Instant::now() + GLANCE).is_ok()
}

/// The ranks without a card, as far as another than rank 0 can tell.
fn missing(start: &Start<'_>, generation: Option<&str>) -> Vec<Rank> {
    let Some(generation) = generation else { return vec![0] };
    let has_card = |rank: &Rank| {
        let found = start.store.get(&format!("{generation}/rank/{rank}"), Duration::ZERO);
        !matches!(found, Ok(None))
    };
    let missing: Vec<Rank> = (0..start.world_size.min(1024)).filter(|rank| !has_card(rank)).collect();
    // All cards are there, but no book: rank 0 has ended, or this generation is a former run's.
    if missing.is_empty() { vec![0] } else { missing }
}

/// Learns which ranks share memory, when not all do: the lowest rank of each host says who its ranks are, and rank 0 puts
/// it together.
pub(super) fn exchange_hosts(start: &Start<'_>, generation: &str, together: &[Rank]) -> Result<Vec<usize>> {
    let patience = left(start).max(GLANCE);
    let key = |rank: Rank| format!("{generation}/host/{rank}");
    if together[0] == start.rank {
        let mut writer = Writer::default();
        writer.list(together, |writer, &rank| _ = writer.number(rank as u64));
        store_error(start, start.store.set(&key(start.rank), &writer.0, patience))?;
    }
    let all = format!("{generation}/hosts");
    let silent = |what: &str| {
        let problem = StoreProblem::Timeout { key: what.to_owned(), waited: patience };
        problem.at(start.store.url())
    };
    if start.rank != 0 {
        let bytes = store_error(start, start.store.get(&all, left(start).max(GLANCE) + GRACE))?.ok_or_else(|| silent(&all))?;
        let hosts = Reader::new(&bytes).list(Reader::size).filter(|hosts| hosts.len() == start.world_size);
        return hosts.ok_or_else(|| silent(&all));
    }
    let mut hosts: Vec<Option<usize>> = vec![None; start.world_size];
    for rank in 0..start.world_size {
        // A rank that nobody before it has named is the lowest of its host.
        if hosts[rank].is_none() {
            let bytes =
                store_error(start, start.store.get(&key(rank), left(start).max(GLANCE)))?.ok_or_else(|| silent(&key(rank)))?;
            for member in Reader::new(&bytes).list(Reader::size).unwrap_or_default() {
                if let Some(host) = hosts.get_mut(member) {
                    *host = Some(rank);
                }
            }
        }
    }
    let hosts: Vec<usize> = hosts.into_iter().enumerate().map(|(rank, host)| host.unwrap_or(rank)).collect();
    let mut writer = Writer::default();
    writer.list(&hosts, |writer, &host| _ = writer.number(host as u64));
    store_error(start, start.store.set(&all, &writer.0, patience))?;
    Ok(hosts)
}
